"""A state through the life of a script: re-made modules, failures, buckets of every kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    BINS,
    GivenGradients,
    assert_compressed,
    exact_gradients,
    gather_all,
    hooked,
    named,
    random_gradients,
    residuals_of,
    wrap,
)
from ranks import RanksFailedError, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adacomp_torch import AdaCompState, adacomp_hook, exchange

# ---- buckets of every kind -----------------------------------------------------------------------

SIZES = {
    "only compressed": [(600, 50), (700, 500)],
    "only raw": [(600, None), (7, None)],
    "mixed": [(600, 50), (7, None), (700, 500), (100, None)],
    "one element, compressed": [(1, 50), (1, 1)],
    "one element, raw": [(1, None)],
    "no elements, compressed": [(0, 50), (3000, 50)],
    "no elements, raw": [(0, None), (3000, 50)],
    "no elements at all": [(0, 50), (0, None)],
}


class Given(nn.Module):
    """Parameters of the given sizes; their gradients are the tensors passed to `forward`."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self, grads: list[Tensor]) -> Tensor:
        return sum((p * g).sum() for p, g in zip(self.weights, grads, strict=True))


def bucket_of(rank: int, kind: str) -> None:
    sizes = [size for size, _ in SIZES[kind]]
    bins = {f"weights.{i}": b for i, (_, b) in enumerate(SIZES[kind])}
    module = Given(sizes)
    ddp = DistributedDataParallel(module)
    state = AdaCompState(ddp, bin_size=bins)
    ddp.register_comm_hook(state, adacomp_hook)
    generator = torch.Generator().manual_seed(rank)
    for step in range(4):
        module.zero_grad()
        grads = [torch.randn(size, generator=generator) for size in sizes]
        before = [
            state.residual(name).clone() if bins[name] else torch.zeros(p.shape)
            for name, p in named(module)
        ]
        ddp(grads).backward()
        for (name, p), grad, old in zip(named(module), grads, before, strict=True):
            new = state.residual(name) if bins[name] else 0.0
            owed = sum(gather_all(old + grad - new))
            assert torch.allclose(3 * p.grad, owed, atol=1e-5), f"{name}, step {step}"
    stats = state.stats()
    assert stats["bytes_sent"] > 0
    assert stats["steps"] == 4


@pytest.mark.parametrize("kind", SIZES)
def test_a_bucket_with(kind):
    # Faults 4, 10 and 25.
    run_ranks(bucket_of, 3, kind)


def dirty_buffers(rank: int) -> None:
    results = []
    for value in (0x00, 0xFF):
        exchange.torch = Filled(value)
        module = GivenGradients()
        ddp, state = hooked(module)
        for step in range(5):
            module.zero_grad()
            ddp(random_gradients(rank, step)).backward()
        assert_compressed(state)
        assert exchange.torch.made > 0
        results.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Filled:
    """torch, but `empty` gives memory full of one byte."""

    def __init__(self, value: int) -> None:
        self.value, self.made = value, 0

    def empty(self, *sizes: Any, **options: Any) -> Tensor:
        self.made += 1
        return torch.empty(*sizes, **options).fill_(self.value)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def test_nothing_of_what_was_in_the_buffers_shows():
    # Fault 8.
    run_ranks(dirty_buffers, 2)


# ---- the collectives -----------------------------------------------------------------------------


def counted_collectives(rank: int) -> list[str]:
    calls: list[str] = []
    real = exchange.all_gather_single

    def counting(*args: Any, **options: Any) -> Any:
        calls.append("all_gather")
        return real(*args, **options)

    exchange.all_gather_single = counting
    module = GivenGradients()
    ddp, state = hooked(module, {"find_unused_parameters": True})
    for step in range(8):
        module.zero_grad()
        grads: list[Tensor | None] = list(random_gradients(rank, step))
        if rank == 1:  # nothing, little, unused, not finite: all of it on this rank only
            if step == 2:
                grads = [torch.zeros(shape) for _, shape in module.SHAPES]
            elif step == 3:
                grads = [None, *(torch.zeros(shape) for _, shape in module.SHAPES[1:])]
            elif step == 4:
                grads[2] = torch.full(module.SHAPES[2][1], float("nan"))
        before = len(calls)
        ddp(grads).backward()
        calls.append(f"end of step {step}")
        buckets = len({e for e in state._exchanges.values() if e.last_step == state._step})
        assert len(calls) - 1 - before == buckets, "one collective per bucket, no more"
    assert_compressed(state)
    return calls


def test_the_collectives_do_not_depend_on_a_ranks_data():
    # Faults 6 and 39.
    first, second, third = run_ranks(counted_collectives, 3)
    assert first == second == third
    assert first.count("all_gather") > 8


# ---- modules made again --------------------------------------------------------------------------


def module_made_again(rank: int) -> None:
    module, other = GivenGradients(), GivenGradients()
    ddp, state = hooked(module)
    whole, whole_state = hooked(other)
    for step in range(8):
        if step == 4:
            saved = state.state_dict()
            del ddp, state
            ddp, state = hooked(module)
            state.load_state_dict(saved)
        for m, d in ((module, ddp), (other, whole)):
            m.zero_grad()
            d(exact_gradients(rank, step)).backward()
    # Once per bucket and step: a second run of the hook would have counted as another step.
    assert state.stats()["steps"] == 4
    assert whole_state.stats()["steps"] == 8
    assert assert_compressed(state)["dropped_chunks"] == 0
    for (name, p), q in zip(named(module), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    for name, residual in residuals_of(state, module).items():
        assert torch.equal(residual, residuals_of(whole_state, other)[name]), name


def test_a_ddp_object_made_again_carries_on():
    # Fault 27.
    run_ranks(module_made_again, 2)


def state_of_a_freed_module(rank: int) -> None:
    module = GivenGradients()
    ddp, state = hooked(module)
    ddp(random_gradients(rank, 0)).backward()
    del ddp
    ddp = wrap(module)
    ddp.register_comm_hook(state, adacomp_hook)
    with pytest.raises(RuntimeError, match="object of this AdaCompState is gone; construct a st"):
        ddp(random_gradients(rank, 1)).backward()


def test_a_state_of_a_module_that_is_gone_is_refused():
    # Fault 27.
    run_ranks(state_of_a_freed_module, 2)


# ---- failures on one rank ------------------------------------------------------------------------


def raises_in_the_hook(rank: int) -> None:
    module = GivenGradients()
    ddp, state = hooked(module)
    for step in range(3):
        module.zero_grad()
        ddp(random_gradients(rank, step)).backward()
    before = residuals_of(state, module)
    if rank == 1:
        exchange.ops.compress = out_of_memory
    try:
        ddp(random_gradients(rank, 3)).backward()
    finally:
        if rank == 1:
            after = residuals_of(state, module)
            assert all(torch.equal(before[name], after[name]) for name in before)
            print("residuals untouched", flush=True)


def out_of_memory(*args: Any, **options: Any) -> None:
    raise MemoryError("no room for the payload")


def test_an_exception_in_the_hook_of_one_rank_is_shown_there_and_ends_the_others():
    # Fault 28.
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(raises_in_the_hook, 2, timeout=30)
    text = str(caught.value)
    assert "rank 1 raised:" in text
    assert "out_of_memory" in text, "the original traceback"
    assert "no room for the payload" in text
    assert "AssertionError" not in text


# ---- what is refused -----------------------------------------------------------------------------


class Wrapped(nn.Module):
    """As FullyShardedDataParallel and others: wraps a module, is no DistributedDataParallel."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def refused_modules(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in (
        nn.Linear(3, 3),
        Wrapped(nn.Linear(3, 3)),
        nn.DataParallel(nn.Linear(3, 3)),
        FullyShardedDataParallel(nn.Linear(30, 30), device_id=torch.device("cpu")),
    ):
        with pytest.raises(TypeError) as caught:
            AdaCompState(module)
        assert f"got {type(module).__name__}" in str(caught.value)
        assert "expected a DistributedDataParallel object" in str(caught.value)


def test_bare_and_otherwise_wrapped_modules_are_refused():
    # Fault 41.
    run_ranks(refused_modules, 1)


def misspelt(rank: int) -> None:
    ddp = wrap(GivenGradients())
    for wrong, hint in (("binsize", " (did you mean 'bin_size'?)"), ("zzz", "")):
        with pytest.raises(TypeError) as caught:
            AdaCompState(ddp, **{wrong: 50})
        assert str(caught.value) == (
            "AdaCompState: expected options bin_size, scale, threshold_factor, start_iter, "
            f"dense_fallback, grad_scaler, process_group, got {wrong!r}{hint}"
        )
    AdaCompState(ddp, bin_size=BINS)


def test_a_misspelt_option_names_the_valid_ones():
    # Fault 42.
    run_ranks(misspelt, 1)


# ---- memory --------------------------------------------------------------------------------------


def tensors_of_a_state(rank: int) -> None:
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.5)
    state = AdaCompState(ddp)
    ddp.register_comm_hook(state, adacomp_hook)
    for step in range(30):
        module.zero_grad()
        ddp(torch.randn(8, 256) + rank).square().mean().backward()
        live = [e for e in state._exchanges.values() if e._payload is not None]
        # The first step is one bucket; its buffers go when the buckets have been rebuilt.
        assert sum(len(e.parameters) for e in live) <= (2 if step == 1 else 1) * 16
        for e in live:
            sent, received = e._payload.numel(), e._gathered.numel()
            assert received == dist.get_world_size() * sent
            assert sent <= 2 * max(e.capacity.payload_bytes(), 64 * 1024 + e.fixed)
            if step < 2:
                assert received <= max(e.dense_bytes, 1024 * 1024)
    compressed = sum(p.numel() for p in module.parameters() if p.numel() >= 512)
    assert sum(t.numel() for t in state._residuals.flat.values()) == compressed
    assert_compressed(state)


def test_the_only_tensor_of_gradient_size_is_the_residual():
    # Fault 18.
    run_ranks(tensors_of_a_state, 2)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def memory_over_many_steps(rank: int, first: int, last: int) -> list[int]:
    module = GivenGradients()
    ddp, state = hooked(module)
    grads = [random_gradients(rank, step) for step in range(50)]
    measured = []
    for step in range(last):
        module.zero_grad()
        ddp(grads[step % 50]).backward()
        if step + 1 in (first, last):
            measured.append(resident_bytes())
    assert_compressed(state)
    return measured


def test_resident_memory_stays_flat_over_2000_steps():
    # Plain DDP grows by 1.3 MB in its first 1,000 steps too. A leak of 256 bytes a step would show.
    for early, late in run_ranks(memory_over_many_steps, 2, 1000, 3000):
        assert late - early < 512 * 1024
