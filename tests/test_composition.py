"""The hook together with the other things that scripts do with DDP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    BINS,
    GivenGradients,
    assert_compressed,
    assert_equal_on_all_ranks,
    exact_gradients,
    gather_all,
    hooked,
    named,
    residuals_of,
    wrap,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_wrapper,
    fp16_compress_wrapper,
)
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from adacomp_torch import AdaCompState, adacomp_hook

BIN = 16


def compressed(
    module: nn.Module, group: dist.ProcessGroup | None = None, **options: Any
) -> tuple[DistributedDataParallel, AdaCompState]:
    """In several small buckets; everything compressed, so that small models have residuals."""
    ddp = wrap(module, process_group=group, **options)
    state = AdaCompState(ddp, bin_size=lambda name, parameter, owner: BIN)
    ddp.register_comm_hook(state, adacomp_hook)
    return ddp, state


class Checked:
    """Steps of `ddp` after each of which agreement and conservation are checked.

    `twin`, a copy of the module made before each step, gives this rank's own gradient.
    """

    def __init__(
        self, ddp: nn.Module, module: nn.Module, state: AdaCompState, group: Any = None
    ) -> None:
        self.ddp, self.module, self.state, self.group = ddp, module, state, group
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.05)

    def step(self, x: Tensor) -> None:
        twin = copy.deepcopy(self.module)
        twin.zero_grad()
        twin(x).square().mean().backward()
        names = [name for name, p in self.module.named_parameters()]
        before = {name: self.state.residual(name).clone() for name in names}
        self.optimizer.zero_grad()
        self.ddp(x).square().mean().backward()
        world_size = dist.get_world_size(self.group)
        for (name, p), own in zip(named(self.module), twin.parameters(), strict=True):
            owed = before[name] + own.grad - self.state.residual(name)
            dist.all_reduce(owed, group=self.group)
            assert torch.allclose(world_size * p.grad, owed, rtol=1e-4, atol=1e-5), name
        self.optimizer.step()

    def done(self, steps: int) -> None:
        stats = assert_compressed(self.state)
        assert stats["steps"] == steps
        flat = torch.cat([p.detach().flatten() for p in self.module.parameters()])
        others = [torch.empty_like(flat) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(others, flat, group=self.group)
        assert all(torch.equal(flat, other) for other in others)


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)
    )


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(16, 24, generator=torch.Generator().manual_seed(100 * step + rank))


# ---- torch's own wrappers ------------------------------------------------------------------------


def under_a_wrapper(rank: int, wrapper: Callable[..., Any]) -> None:
    module = GivenGradients()
    ddp = wrap(module)
    state = AdaCompState(ddp, bin_size=BINS)
    ddp.register_comm_hook(state, wrapper(adacomp_hook))
    for step in range(6):
        grads = exact_gradients(rank, step)
        before = residuals_of(state, module)
        module.zero_grad()
        ddp(grads).backward()
        after = residuals_of(state, module)
        assert_equal_on_all_ranks([p.grad for p in module.parameters()], f"step {step}")
        for (name, p), grad in zip(named(module), grads, strict=True):
            kept = sum(gather_all(before[name] + grad))
            assert torch.equal(sum(gather_all(after[name])) + 2 * p.grad, kept), name
    stats = assert_compressed(state)
    assert stats["dense_bytes"] == 6 * 2 * sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("wrapper", [fp16_compress_wrapper, bf16_compress_wrapper])
def test_under_torchs_half_precision_wrappers(wrapper):
    run_ranks(under_a_wrapper, 2, wrapper)


# ---- modules -------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.out = nn.Linear(24, 40, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long().clamp(max=39)
        return self.out(self.embedding(tokens).mean(1))


class Recomputed(nn.Module):
    """Activation checkpointing: the forward runs again inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


MODULES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "tied weights": (Tied, {}),
    "batch norm, buffers broadcast": (
        lambda: nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)),
        {"broadcast_buffers": True},
    ),
    "batch norm, buffers not broadcast": (
        lambda: nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)),
        {"broadcast_buffers": False},
    ),
    "activation checkpointing": (Recomputed, {"static_graph": True}),
    "activation checkpointing, dynamic": (Recomputed, {"gradient_as_bucket_view": True}),
    "no extras": (perceptron, {}),
}


def module_in_use(rank: int, what: str) -> None:
    build, options = MODULES[what]
    torch.manual_seed(0)
    module = build()
    ddp, state = compressed(module, **options)
    run = Checked(ddp, module, state)
    for step in range(6):
        run.step(inputs(rank, step))
    run.done(6)


@pytest.mark.parametrize("what", MODULES)
def test_modules_and_ddp_options(what):
    run_ranks(module_in_use, 2, what)


def clipped_and_accumulated(rank: int) -> None:
    """What the optimizer does with the decoded gradient is no business of the residual."""
    module = perceptron()
    ddp, state = compressed(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1)
    for step in range(6):
        for set_to_none in (True, False):
            before = state.residual("0.weight").clone()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert torch.equal(before, state.residual("0.weight"))
        with ddp.no_sync():
            ddp(inputs(rank, 2 * step)).square().mean().backward()
        ddp(inputs(rank, 2 * step + 1)).square().mean().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        before = state.residual("0.weight").clone()
        optimizer.step()
        assert torch.equal(before, state.residual("0.weight"))
    assert assert_compressed(state)["steps"] == 6
    assert_equal_on_all_ranks(list(module.parameters()), "parameters")


def test_zero_grad_clipping_and_the_optimizer_never_touch_a_residual():
    # Fault 36.
    run_ranks(clipped_and_accumulated, 2)


# ---- several modules, groups and collectives -----------------------------------------------------


def two_modules(rank: int) -> None:
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        module = perceptron()
        ddp, state = compressed(module)
        runs.append(Checked(ddp, module, state))
    for step in range(6):
        for i, run in enumerate(runs):
            if step % (i + 1) == 0:  # one of them trains every other step
                run.step(inputs(rank, step))
    runs[0].done(6)
    runs[1].done(3)


def test_two_ddp_modules_in_one_program():
    run_ranks(two_modules, 2)


def two_modules_in_one_backward(rank: int) -> None:
    first, second = perceptron(), nn.Linear(8, 40)
    ddp_first, state_first = compressed(first)
    ddp_second, state_second = compressed(second)
    for step in range(5):
        ddp_second(ddp_first(inputs(rank, step))).square().mean().backward()
        for module in (first, second):
            assert_equal_on_all_ranks([p.grad for p in module.parameters()], f"step {step}")
            module.zero_grad()
    assert assert_compressed(state_first)["steps"] == 5
    assert assert_compressed(state_second)["steps"] == 5


def test_two_ddp_modules_in_one_backward():
    run_ranks(two_modules_in_one_backward, 2)


def sub_groups(rank: int) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    group = groups[rank // 2]
    module = perceptron()
    ddp, state = compressed(module, group)
    run = Checked(ddp, module, state, group)
    for step in range(5):
        run.step(inputs(rank, step))
    run.done(5)


def test_ranks_in_sub_groups():
    run_ranks(sub_groups, 3)


def own_group(rank: int) -> None:
    module = perceptron()
    ddp = wrap(module)
    state = AdaCompState(ddp, bin_size=lambda *_: BIN, process_group=dist.new_group([0, 1]))
    ddp.register_comm_hook(state, adacomp_hook)
    run = Checked(ddp, module, state)
    for step in range(4):
        run.step(inputs(rank, step))
    run.done(4)


def test_an_exchange_over_a_group_of_its_own():
    run_ranks(own_group, 2)


def collectives_in_flight(rank: int) -> None:
    module = perceptron()
    ddp, state = compressed(module)
    run = Checked(ddp, module, state)
    for step in range(5):
        mine = torch.full((100_000,), float(rank + 1))
        work = dist.all_reduce(mine, async_op=True)
        run.step(inputs(rank, step))
        work.wait()
        assert (mine == 3).all()
    run.done(5)


def test_other_collectives_in_flight():
    run_ranks(collectives_in_flight, 2)


# ---- modes of torch ------------------------------------------------------------------------------


def compiled(rank: int, where: str) -> None:
    module = perceptron()
    if where == "ddp":
        # With dynamo's own limit on small buckets: one bucket.
        ddp = DistributedDataParallel(module)
        state = AdaCompState(ddp, bin_size=lambda *_: BIN)
        ddp.register_comm_hook(state, adacomp_hook)
        run = Checked(torch.compile(ddp, backend="aot_eager"), module, state)
    else:
        inner = torch.compile(module, backend="aot_eager")
        ddp, state = compressed(inner)
        plain = {f"_orig_mod.{name}": p for name, p in named(module)}
        assert set(plain) == set(dict(ddp.module.named_parameters()))
        run = Checked(ddp, ddp.module, state)
    for step in range(4):
        run.step(inputs(rank, step))
    run.done(4)


@pytest.mark.parametrize("where", ["ddp", "module"])
def test_torch_compile_of(where):
    run_ranks(compiled, 2, where)


def deterministic(rank: int) -> None:
    results = []
    for mode in (False, True):
        torch.use_deterministic_algorithms(mode)
        module = GivenGradients()
        ddp, state = hooked(module)
        for step in range(4):
            module.zero_grad()
            ddp(exact_gradients(rank, step)).backward()
        assert_compressed(state)
        results.append(
            [*(p.grad for p in module.parameters()), *residuals_of(state, module).values()]
        )
    torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_deterministic_algorithms_mode():
    run_ranks(deterministic, 2)


def hook_is_taken(rank: int, what: str) -> str:
    module = perceptron()
    if what == "optimizer in the backward":
        _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(module)
    if what == "allreduce_hook":
        ddp.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ValueError, match="expected no communication hook yet") as caught:
        AdaCompState(ddp)
    return str(caught.value)


@pytest.mark.parametrize("what", ["optimizer in the backward", "allreduce_hook"])
def test_a_module_whose_hook_is_taken_is_refused(what):
    assert what in run_ranks(hook_is_taken, 1, what)[0]
