"""The hook in the life of a DDP module: dense steps, dtypes, memory formats, uneven ranks."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    GivenGradients,
    assert_compressed,
    assert_equal_on_all_ranks,
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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from adacomp_torch import AdaCompState, adacomp_hook, exchange

WORLD_SIZES = (2, 3)


# ---- dense steps before start_iter ---------------------------------------------------------------


def train_dense_then_compressed(rank: int, start_iter: int, steps: int, against: str) -> None:
    module, other = GivenGradients(), GivenGradients()
    ddp, state = hooked(module, start_iter=start_iter)
    rival = wrap(other)
    if against == "allreduce_hook":
        rival.register_comm_hook(None, allreduce_hook)
    for step in range(steps):
        module.zero_grad()
        other.zero_grad()
        grads = random_gradients(rank, step)
        ddp(grads).backward()
        rival(grads).backward()
        same = [
            torch.equal(a.grad, b.grad)
            for a, b in zip(module.parameters(), other.parameters(), strict=True)
        ]
        residual = max(float(r.abs().max()) for r in residuals_of(state, module).values())
        if step < start_iter:
            assert all(same), f"step {step}"
            assert residual == 0
        else:
            assert not all(same), f"step {step} was dense"
            assert residual > 0
    stats = state.stats()
    assert stats["steps"] == steps
    assert stats["compressed_steps"] == steps - start_iter


@pytest.mark.parametrize("start_iter", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("world_size", "against"), [(2, "allreduce_hook"), (2, "plain DDP"), (3, "allreduce_hook")]
)
def test_steps_before_start_iter_are_dense_bit_for_bit(start_iter, world_size, against):
    run_ranks(train_dense_then_compressed, world_size, start_iter, 5, against)


# ---- means, dtypes, layouts of memory ------------------------------------------------------------


def constant_gradients(rank: int, dtype: torch.dtype) -> None:
    module = GivenGradients(dtype)
    ddp, state = hooked(module, dense_fallback=None)
    for _ in range(3):
        module.zero_grad()
        ddp([torch.full(shape, rank + 1.0, dtype=dtype) for _, shape in module.SHAPES]).backward()
        mean = (dist.get_world_size() + 1) / 2
        for name, p in named(module):
            assert (p.grad == mean).all(), name
            assert p.grad.dtype == dtype
    # Every element is its bin's maximum and goes at once: compressed, if not small.
    assert state.stats()["entries_per_bin"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_constant_gradients_give_exactly_the_mean(world_size, dtype):
    run_ranks(constant_gradients, world_size, dtype)


def half_gradients_at_the_ends_of_the_range(rank: int) -> None:
    module = GivenGradients(torch.float16)
    ddp, state = hooked(module, dense_fallback=None)
    for value in (6e4, 1e-7):
        module.zero_grad()
        wanted = torch.tensor(value, dtype=torch.float16)
        for name, _ in named(module):
            if name not in ("bias", "scalar"):
                state.residual(name).zero_()
        ddp([wanted.expand(shape) for _, shape in module.SHAPES]).backward()
        for name, p in named(module):
            assert (p.grad == wanted).all(), f"{name}: {value} became {p.grad.flatten()[0]}"


def test_half_gradients_neither_overflow_in_the_sum_nor_flush_to_zero():
    # Fault 17.
    run_ranks(half_gradients_at_the_ends_of_the_range, 2)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 24, 5)
        self.point = nn.Conv2d(24, 40, 1)
        self.last = nn.Linear(40, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.point(torch.relu(self.wide(x)))
        return self.last(torch.relu(y).mean((2, 3)))


def memory_formats(rank: int, channels_last: bool) -> None:
    torch.manual_seed(0)
    module = Convolutions()
    module.last.weight = nn.Parameter(torch.randn(40, 16).t())  # a transposed weight
    if channels_last:
        module = module.to(memory_format=torch.channels_last)
    # Bins of one element: every element is its own maximum, so all that is not zero is sent.
    ddp, state = hooked(module, bin_size=1, scale="bin")
    ddp(same_input(rank)).square().sum().backward()
    for name, p in named(module):
        if p.numel() < 512:
            continue
        assert state.residual(name).shape == p.shape
        means = (
            sum(t.double() for t in gather_all(state.residual(name) + 0.0)) / dist.get_world_size()
        )
        local = torch.autograd.grad(
            module(same_input(rank)).square().sum(), dict(named(module))[name]
        )[0]
        dense = sum(t.double() for t in gather_all(local)) / dist.get_world_size()
        assert torch.allclose(p.grad.double() + means, dense, rtol=1e-4, atol=1e-5), name
    assert state.stats()["entries_per_bin"] > 0


def same_input(rank: int) -> Tensor:
    torch.manual_seed(rank)
    return torch.randn(4, 3, 9, 9)


@pytest.mark.parametrize("channels_last", [False, True])
def test_every_memory_format_conserves_the_gradient_in_place(channels_last):
    # Fault 24: the residual's view must lie as the gradient does, or this sum is scrambled.
    run_ranks(memory_formats, 2, channels_last)


# ---- sizes, uneven ranks, the rest of life inside DDP --------------------------------------------


def one_hot_against_dense(rank: int, dense_rank: int) -> None:
    module = GivenGradients()
    ddp, state = hooked(module)
    for step in range(6):
        module.zero_grad()
        grads = [torch.zeros(shape) for _, shape in module.SHAPES]
        if rank == dense_rank:
            grads = random_gradients(rank, step)
        elif step % 2 == 0:
            grads[0][3, 7] = 1.0
        ddp(grads).backward()
        assert_equal_on_all_ranks([p.grad for p in module.parameters()], f"step {step}")
    assert_compressed(state)


@pytest.mark.parametrize("dense_rank", [0, 1])
def test_ranks_with_very_different_payloads(dense_rank):
    # Faults 1 and 3.
    run_ranks(one_hot_against_dense, 2, dense_rank)


def zero_gradients(rank: int) -> None:
    module = GivenGradients()
    ddp, state = hooked(module)
    ddp([torch.zeros(shape) for _, shape in module.SHAPES]).backward()
    assert all((p.grad == 0).all() for p in module.parameters())
    assert state.stats()["entries_per_bin"] == 0
    for bucket in state._exchanges.values():
        needed = bucket._reports[-1].needed_bytes()
        assert needed == bucket.fixed, "a zero gradient needs no entries"
    for step in range(5):
        module.zero_grad()
        ddp(random_gradients(rank, step)).backward()
    assert_compressed(state)


def test_zero_gradients_need_only_the_header():
    # Fault 2.
    run_ranks(zero_gradients, 2)


def unused_parameters(rank: int) -> None:
    module = GivenGradients()
    ddp, state = hooked(module, {"find_unused_parameters": True})
    for step in range(4):
        module.zero_grad(set_to_none=True)
        grads: list[Tensor | None] = list(random_gradients(rank, step))
        grads[2] = None  # on every rank
        if rank == 1:
            grads[4] = None  # here only
        before = state.residual("second").clone(), state.residual("third").clone()
        ddp(grads).backward()
        assert module.second.grad is None
        assert torch.equal(before[0], state.residual("second"))
        if rank == 1:
            assert torch.equal(before[1], state.residual("third"))
        assert_equal_on_all_ranks(
            [p.grad for p in module.parameters() if p.grad is not None], f"step {step}"
        )
    assert_compressed(state)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_unused_parameters_lose_no_residual(world_size):
    # Fault 20.
    run_ranks(unused_parameters, world_size)


def non_finite_gradients(rank: int, value: float) -> None:
    module = GivenGradients()
    ddp, state = hooked(module)
    for step in range(7):
        module.zero_grad()
        grads = random_gradients(rank, step)
        spoilt = step in (2, 3, 4)
        if spoilt and rank == 1:
            grads[0][5, 5] = value
        ddp(grads).backward()
        finite = bool(torch.isfinite(module.first.grad).all())
        assert finite != spoilt, f"step {step}"
        assert torch.isfinite(module.third.grad).all()
        for residual in residuals_of(state, module).values():
            assert torch.isfinite(residual).all()
        assert_equal_on_all_ranks([p.grad for p in module.parameters()], f"step {step}")
    assert_compressed(state)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_non_finite_gradient_on_one_rank_shows_on_all_and_passes(value):
    # Faults 22 and 23.
    run_ranks(non_finite_gradients, 2, value)


def alone(rank: int) -> None:
    module = GivenGradients()
    ddp, state = hooked(module)
    for step in range(3):
        module.zero_grad()
        before = residuals_of(state, module)
        grads = exact_gradients(0, step)
        ddp(grads).backward()
        after = residuals_of(state, module)
        for (name, p), grad in zip(named(module), grads, strict=True):
            assert torch.equal(p.grad + after[name], before[name] + grad), name
    assert_compressed(state)


def test_world_size_one():
    # Fault 30.
    run_ranks(alone, 1)


def uneven_inputs(rank: int) -> None:
    module = GivenGradients()
    ddp, state = hooked(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with ddp.join():
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            ddp(random_gradients(rank, step)).backward()
            optimizer.step()
    assert_equal_on_all_ranks(list(module.parameters()), "parameters")
    assert_compressed(state)


def test_join_with_uneven_inputs():
    # Fault 14.
    run_ranks(uneven_inputs, 2)


def killed_in_a_later_step(rank: int) -> None:
    module = GivenGradients()
    ddp, _ = hooked(module)
    for step in range(4):
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        ddp(random_gradients(rank, step)).backward()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_others_say_what_happened_when_a_rank_is_killed(world_size):
    # Fault 9: not a word about payloads, of which none came.
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(killed_in_a_later_step, world_size)
    text = str(caught.value)
    assert "rank 1 died of SIGKILL" in text
    assert "adacomp_hook: bucket" in text
    assert "the all-gather failed: " in text
    assert "magic" not in text


def freed(rank: int) -> None:
    module = GivenGradients()
    ddp, state = hooked(module)
    ddp(random_gradients(rank, 0)).backward()
    watched = weakref.ref(ddp), weakref.ref(module)
    del ddp, module
    gc.collect()
    assert [ref() for ref in watched] == [None, None]
    with pytest.raises(RuntimeError, match="is gone"):
        state.state_dict()


def test_the_state_keeps_no_module_alive():
    # Fault 19.
    run_ranks(freed, 1)


def callbacks_at_exit(rank: int) -> None:
    class Counting(weakref.WeakSet):
        added = 0

        def add(self, item: object) -> None:
            Counting.added += 1
            super().add(item)

    exchange._callbacks = Counting()
    module = GivenGradients()
    ddp, state = hooked(module)
    for step in range(3):
        ddp(random_gradients(rank, step)).backward()
    exchange._wait_for_callbacks()
    assert len(exchange._callbacks) == 0
    assert Counting.added >= 3
    assert_compressed(state)


def test_at_exit_no_thread_of_the_backend_holds_a_callback_any_more():
    # Otherwise it may ask for the GIL while the interpreter shuts down, which aborts the process.
    run_ranks(callbacks_at_exit, 2)


# ---- capacity ------------------------------------------------------------------------------------


class Wide(nn.Module):
    """One parameter that is large enough for its first capacity to be less than its worst case."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(512, 1024))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


def capacities(rank: int, scale: str) -> None:
    module = Wide()
    ddp = DistributedDataParallel(module)
    state = AdaCompState(ddp, bin_size=50, scale=scale)
    ddp.register_comm_hook(state, adacomp_hook)
    torch.manual_seed(rank)
    world_size = dist.get_world_size()
    sizes = []
    sent = torch.zeros(module.weight.shape)
    total = torch.zeros(module.weight.shape)
    for step in range(48):
        module.zero_grad()
        # Every element equal: all of them are selected, far more than there is room for.
        value = torch.full(module.weight.shape, 1.0) if step in (0, 9, 10) else None
        grad = torch.randn(module.weight.shape) if value is None else value
        already = state.stats()["bytes_sent"]
        ddp(grad).backward()
        sizes.append(state.stats()["bytes_sent"] - already)
        sent += module.weight.grad
        total += grad
    assert len({tuple(other) for other in gather_objects(sizes)}) == 1, "capacities differ"
    dense = 4 * module.weight.numel()
    assert all(world_size * size <= dense for size in sizes[:2])
    stats = assert_compressed(state)
    assert stats["dropped_chunks"] > 0
    # Settled, without the burst that left the window at step 10 + 34.
    assert sizes[-1] < sizes[12]
    # Nothing of what was dropped is lost.
    everything = sum(gather_all(total - state.residual("weight")))
    assert torch.allclose(sent * world_size, everything, atol=1e-2)


def gather_objects(value: object) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


@pytest.mark.parametrize("scale", ["layer", "bin"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_capacity_is_bounded_agreed_on_and_drops_without_loss(world_size, scale):
    run_ranks(capacities, world_size, scale)
