"""How payloads are sized: from what was needed, the same on all ranks, bounded whatever comes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import gather_all
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adacomp_torch import AdaCompState, adacomp_hook, capacity, ops
from adacomp_torch.layout import chunk_count, make_layout


def rooms(needs: Sequence[int], most: int = 10**9) -> list[int]:
    """Room for entries in each exchange, with headers that arrive two exchanges later."""
    policy = capacity.Capacity(fixed=64, most=most, first_entry_bytes=512, pays_up_to=None)
    rooms = []
    for n in range(len(needs)):
        if n >= 2:
            policy.add(64 + needs[n - 2])
        size = policy.begin()
        assert size is not None
        rooms.append(size - 64)
    return rooms


def padding_and_late(needs: Sequence[int], skip: int = 50) -> tuple[float, float]:
    pairs = list(zip(rooms(needs), needs, strict=True))[skip:]
    padding = sum(max(0, room - need) for room, need in pairs)
    late = sum(max(0, need - room) for room, need in pairs)
    return padding / sum(room for room, _ in pairs), late / sum(need for _, need in pairs)


def test_constant_needs_have_no_padding_but_the_alignment():
    assert rooms([1000] * 100)[2:] == [1008] * 98


@pytest.mark.parametrize("deviation", [0.05, 0.1, 0.2])
def test_needs_that_vary_have_bounded_padding_and_are_seldom_late(deviation):
    r = random.Random(0)
    needs = [max(0, round(r.gauss(20_000, deviation * 20_000))) for _ in range(5000)]
    padding, late = padding_and_late(needs)
    assert padding < 2.5 * deviation
    assert late < 0.02 * deviation


def test_the_size_is_the_mean_and_five_halves_of_the_deviation_of_the_last_32_or_the_later_half():
    r = random.Random(1)
    needs = [r.randrange(10**6) for _ in range(100)]
    for n, room in enumerate(rooms(needs)):
        headers = max(0, n - 1)
        last = needs[max(0, headers - min(32, max(4, headers // 2))) : headers]
        if last:
            exact = statistics.fmean(last) + 5 / 2 * statistics.pstdev(last)
            assert exact - 2 <= room <= exact + 16
            assert room % 16 == 0


def test_needs_at_a_new_level_fit_after_seven_exchanges():
    for low, high in ((1000, 5000), (0, 10**6)):
        late = [high > room for room in rooms([low] * 50 + [high] * 50)]
        assert not any(late[57:])
        assert late[50]


@pytest.mark.parametrize("every", [2, 4, 8, 16])
def test_a_rare_need_finds_room_that_half_of_it_fits_into(every):
    # What is late goes in the next exchange, in the room that is then empty.
    needs = [10_000 if n % every == 0 else 0 for n in range(200)]
    room = rooms(needs)[100:]
    assert min(room) >= 10_000 / (1 if every <= 4 else 2)


def test_large_needs_at_first_are_soon_forgotten():
    assert rooms([50_000] * 3 + [1000] * 20)[12:] == [1008] * 11


def test_needs_that_double_are_never_given_more_than_there_can_be():
    sizes = rooms([min(2**n, 2**60) for n in range(200)], most=4096)
    assert max(sizes) == 4096 - 64
    assert min(sizes[20:]) == 4096 - 64


@pytest.mark.parametrize("bin_size", [1, 50, 64, 500, 5000])
@pytest.mark.parametrize("numel", [0, 1, 4095, 4097, 100_003])
def test_chunks_are_counted_as_the_payload_counts_them(numel, bin_size):
    layout = make_layout([numel, 3], [bin_size, None])
    payload = torch.zeros(ops.payload_capacity(layout)[1], dtype=torch.uint8)
    ops.compress(torch.ones(numel + 3), torch.zeros(numel), layout, payload)
    table = ops.inspect_payload(payload, layout)["chunk_table"]
    assert chunk_count(numel, bin_size) == len(table) - 1
    assert chunk_count(numel, None) == 0


# ---- in training ---------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256, 1024))

    def forward(self, grad: Tensor) -> Tensor:
        return (self.weight * grad).sum()


def doubling(rank: int, kind: str, fallback: float | None) -> dict[str, Any]:
    """Ever more of the elements are needed: all of their bin's size, in ever more bins."""
    module = Wide()
    ddp = DistributedDataParallel(module)
    state = AdaCompState(ddp, bin_size=64, dense_fallback=fallback)
    ddp.register_comm_hook(state, adacomp_hook)
    world_size, numel = dist.get_world_size(), module.weight.numel()
    generator = torch.Generator().manual_seed(rank)
    sent = torch.zeros(module.weight.shape, dtype=torch.float64)
    total = torch.zeros(module.weight.shape, dtype=torch.float64)
    sizes = []
    for step in range(30):
        count = min(numel, 2 ** (step % 20))
        if kind == "on one rank only" and rank == 1:
            count = 1
        grad = torch.zeros(numel)
        grad[torch.randperm(numel, generator=generator)[:count]] = 1.0
        grad = grad.view(module.weight.shape)
        already = state.stats()["bytes_sent"]
        module.zero_grad()
        ddp(grad).backward()
        sizes.append(state.stats()["bytes_sent"] - already)
        grads = gather_all(module.weight.grad)
        assert all(torch.equal(grads[0], other) for other in grads)
        sent += module.weight.grad
        total += grad
    assert all(0 < size <= 4 * numel for size in sizes)
    mine, *others = gather_all(torch.tensor(sizes))
    assert all(torch.equal(mine, other) for other in others)
    owed = sum(gather_all(total - state.residual("weight")))
    assert torch.allclose(world_size * sent, owed, atol=1e-3)
    return state.stats()


@pytest.mark.parametrize("fallback", [2.0, None])
@pytest.mark.parametrize("kind", ["on all ranks", "on one rank only"])
def test_needs_that_double_in_every_step_stay_correct_and_bounded(kind, fallback):
    first, second = run_ranks(doubling, 2, kind, fallback)
    assert 0 < first["bytes_sent"] == second["bytes_sent"] < first["dense_bytes"]
    assert first["dropped_chunks"] > 0
    assert 0 < first["dropped_share"] < 1
    assert (second["dropped_chunks"] > 0) == (kind == "on all ranks")
