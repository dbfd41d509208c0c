"""Where compressing does not pay: when exchanges are dense, and that nothing is lost by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import (
    GivenGradients,
    assert_equal_on_all_ranks,
    exact_gradients,
    gather_all,
    hooked,
    named,
    random_gradients,
    residuals_of,
)
from ranks import run_ranks
from torch import Tensor

from adacomp_torch import AdaCompState, capacity
from adacomp_torch.dense import put_back, take_shares
from adacomp_torch.layout import BucketParameter

# ---- when ----------------------------------------------------------------------------------------


def sizes(
    needs: Callable[[int, int], int], exchanges: int, fixed: int = 64, pays_up_to: int = 1024
) -> list[int | None]:
    """Payload bytes of each exchange, None if dense, with headers that arrive two exchanges later.

    `needs`: (exchange, compressed exchanges since the last dense one) -> entry bytes.
    """
    policy = capacity.Capacity(
        fixed=fixed, most=10**6, first_entry_bytes=512, pays_up_to=pays_up_to
    )
    arriving: dict[int, int] = {}
    sizes: list[int | None] = []
    since_dense = 0
    for n in range(exchanges):
        if n - 2 in arriving:
            policy.add(arriving[n - 2])
        sizes.append(policy.begin())
        since_dense = 0 if sizes[-1] is None else since_dense + 1
        if sizes[-1] is not None:
            arriving[n] = fixed + needs(n, since_dense - 1)
    return sizes


def test_needs_beyond_what_pays_are_dense_for_64_exchanges_then_tried_again():
    dense = [size is None for size in sizes(lambda n, _: 2000, 3 * 67)]
    assert dense == 3 * ([False] * 3 + [True] * 64)


def test_a_payload_never_exceeds_what_pays():
    compressed = [size for size in sizes(lambda n, _: 2000, 200) if size is not None]
    assert compressed
    assert max(compressed) <= 1024


def test_a_trial_ends_the_dense_exchanges_once_needs_are_small():
    dense = [size is None for size in sizes(lambda n, _: 2000 if n < 10 else 500, 300)]
    assert dense == [False] * 3 + [True] * 64 + [False] * 233


def test_needs_that_fall_are_waited_for():
    # Independent gradients with bins of 50: entries of the steps after residuals were empty.
    entries = (10.99, 8.17, 7.01, 6.33, 5.95, 5.72, 5.55, 5.42, 5.27, 5.23, 5.24, 5.16)
    fall = sizes(lambda n, since: int(100 * entries[min(since, 11)]), 200, pays_up_to=600 + 64)
    assert None not in fall


def test_a_single_large_need_is_not_a_reason():
    assert None not in sizes(lambda n, _: 5000 if n % 3 == 0 else 100, 200)


def test_what_can_never_pay_is_always_dense():
    assert sizes(lambda n, _: 0, 200, fixed=1040) == [None] * 200


@pytest.mark.parametrize(
    ("dense_bytes", "world_size", "ratio", "bytes_"),
    [(1600, 2, 2.0, 1584), (1616, 2, 2.0, 1600), (1600, 3, 2.0, 1056), (8, 2, 2.0, 0)],
)
def test_what_pays_is_the_largest_payload_below_the_ratio(dense_bytes, world_size, ratio, bytes_):
    assert capacity.largest_that_pays(dense_bytes, world_size, ratio) == bytes_
    assert world_size * (bytes_ + 16) >= ratio * dense_bytes > world_size * bytes_


WRONG: list[tuple[object, type[Exception], str]] = [
    (0.0, ValueError, "dense_fallback: expected a finite number > 0, or None, got 0.0"),
    (float("inf"), ValueError, "dense_fallback: expected a finite number > 0, or None, got inf"),
    (float("nan"), ValueError, "dense_fallback: expected a finite number > 0, or None, got nan"),
    (True, TypeError, "dense_fallback: expected a number or None, got bool"),
    ("2", TypeError, "dense_fallback: expected a number or None, got str"),
]


def wrong_options(rank: int) -> None:
    for value, kind, message in WRONG:
        with pytest.raises(kind) as caught:
            hooked(GivenGradients(), dense_fallback=value)
        assert str(caught.value) == message


def test_a_wrong_dense_fallback_is_refused():
    run_ranks(wrong_options, 1)


# ---- the arithmetic ------------------------------------------------------------------------------

PARAMETERS = [BucketParameter("raw", 3, None, -1), BucketParameter("weight", 5, 50, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 200])
def test_shares_and_residual_together_are_residual_plus_gradient(dtype, world_size):
    torch.manual_seed(0)
    grad, before = torch.randn(8).to(dtype), torch.randn(9)
    grad[4], before[3] = 1e-6, 0.0
    shares, residual = grad.clone(), before.clone()
    take_shares(shares, residual, PARAMETERS, world_size)
    assert torch.equal(shares[:3], grad[:3] / world_size)
    g = before[2:7] + grad[3:].float()
    assert torch.equal(shares[3:], (g / world_size).to(dtype))
    assert torch.allclose(world_size * shares[3:].float() + residual[2:7], g, rtol=0, atol=2e-7)
    left = torch.finfo(dtype).eps * g.abs() + world_size * torch.finfo(dtype).smallest_normal
    assert (residual[2:7].abs() <= left).all()
    elsewhere = torch.ones(9, dtype=torch.bool)
    elsewhere[2:7] = False
    assert torch.equal(residual[elsewhere], before[elsewhere])
    for condition in (False, True):
        put_back(shares, residual, PARAMETERS, world_size, torch.tensor([condition]))
        assert condition == torch.allclose(residual[2:7], g, rtol=1e-6, atol=1e-6)
    assert torch.equal(residual[elsewhere], before[elsewhere])


def test_a_parameter_whose_gradient_is_zero_sends_nothing_and_keeps_its_residual():
    residual = torch.arange(9.0)
    shares = torch.zeros(8)
    take_shares(shares, residual, PARAMETERS, 2)
    assert torch.equal(shares, torch.zeros(8))
    assert torch.equal(residual, torch.arange(9.0))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), "overflow"])
def test_where_the_sum_is_not_finite_the_share_is_nan_and_the_residual_stays(bad):
    residual, shares = torch.full((9,), 2.0), torch.ones(8)
    if bad == "overflow":
        residual[4] = shares[5] = torch.finfo(torch.float32).max
    else:
        shares[5] = bad
    before = residual.clone()
    take_shares(shares, residual, PARAMETERS, 2)
    assert shares.isnan().nonzero().flatten().tolist() == [5]
    assert residual[4] == before[4]
    assert torch.equal(residual[[2, 3, 5, 6]], torch.zeros(4))
    put_back(shares, residual, PARAMETERS, 2, torch.ones(1, dtype=torch.bool))
    assert torch.equal(residual[2:7], torch.where(torch.arange(5) == 2, before[4], 3.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 64])
def test_the_sum_of_the_largest_shares_is_finite_and_the_rest_stays(dtype, world_size):
    largest = torch.finfo(dtype).max
    shares, residual = torch.full((8,), largest, dtype=dtype), torch.zeros(9)
    if dtype == torch.float16:
        residual += largest
    g = residual[2:7] + shares[3:].float()
    take_shares(shares, residual, PARAMETERS, world_size)
    total = torch.zeros(5, dtype=dtype)
    for _ in range(world_size):
        total += shares[3:]
    assert total.isfinite().all()
    assert (total > 0.4 * largest).all()
    assert torch.allclose(residual[2:7] / g, 1 - shares[3:].float() / (g / world_size), atol=1e-6)


# ---- in training ---------------------------------------------------------------------------------


class Watched:
    """A module whose residuals, gradients and bytes are checked after every step."""

    def __init__(self, dtype: torch.dtype, exact: bool, **options: Any) -> None:
        self.module = GivenGradients(dtype)
        self.exact = exact
        ddp_options = options.pop("ddp", {})
        self.ddp, self.state = hooked(self.module, ddp_options, **options)
        self.eps = torch.finfo(dtype).eps
        self.dense_bytes = sum(p.numel() * p.element_size() for p in self.module.parameters())

    def step(self, grads: list[Tensor], what: str) -> int:
        """Returns how many of the buckets were dense."""
        world_size = dist.get_world_size()
        self.module.zero_grad()
        before, counted = residuals_of(self.state, self.module), self.state.stats()
        self.ddp(grads).backward()
        after, stats = residuals_of(self.state, self.module), self.state.stats()
        assert_equal_on_all_ranks([p.grad for p in self.module.parameters()], what)
        for (name, p), grad in zip(named(self.module), grads, strict=True):
            kept = sum(t.double() for t in gather_all(before[name] + grad.float()))
            now = sum(t.double() for t in gather_all(after[name])) + world_size * p.grad.double()
            size = sum(t.double() for t in gather_all(before[name].abs() + grad.float().abs()))
            bound = 0 if self.exact else 2 * world_size * self.eps * size + 1e-6
            assert ((now - kept).abs() <= bound).all(), f"{what}, {name}"
        sent = stats["bytes_sent"] - counted["bytes_sent"]
        assert 0 < sent <= self.dense_bytes, what
        return int(stats["fallbacks"] - counted["fallbacks"])


def as_large_as_they_come(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    """Signs times a size that trebles with each step: every element is needed, always.

    Even where a chunk was always dropped: |residual| < |dW| / 2, so that |H| > 3/2 |dW| > |G|.
    """
    generator = torch.Generator().manual_seed(100 * step + rank)
    shapes = [shape for _, shape in GivenGradients.SHAPES]
    signs = [torch.randint(0, 2, shape, generator=generator) * 2 - 1 for shape in shapes]
    return [(sign * 3.0 ** (step - 8)).to(dtype) for sign in signs]


def through_dense_and_back(rank: int, exact: bool, options: dict[str, Any]) -> list[int]:
    capacity._DENSE_EXCHANGES = 4
    watched = Watched(torch.float32, exact, dense_fallback=0.1, **options)
    dense = []
    for step in range(22):
        # Constant needs, then such small ones that compressing pays.
        grads = exact_gradients(rank, 0) if step < 14 else exact_gradients(rank, step)
        if not exact:
            grads = as_large_as_they_come(rank, step, torch.float32)
        if step >= 14:
            grads = [torch.where(torch.arange(g.numel()).view(g.shape) < 64, g, 0.0) for g in grads]
            if exact:
                grads = [torch.zeros_like(g) for g in grads]
        dense.append(watched.step(grads, f"step {step}"))
    stats = watched.state.stats()
    assert 0 < stats["fallbacks"] == sum(dense) < stats["exchanges"]
    assert stats["fallback_bytes"] > 0
    assert stats["entries_per_bin"] > 0
    return dense


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "bin scales": {"scale": "bin"},
    "start_iter": {"start_iter": 2},
    "find_unused_parameters": {"ddp": {"find_unused_parameters": True}},
    "gradient_as_bucket_view": {"ddp": {"gradient_as_bucket_view": True}},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_conservation_is_exact_through_dense_exchanges_and_back(options):
    first, second = run_ranks(through_dense_and_back, 2, True, OPTIONS[options])
    assert first == second
    assert max(first) > 0
    assert first[-1] == 0, "compressed again"


@pytest.mark.parametrize("options", OPTIONS)
def test_conservation_holds_through_dense_exchanges_and_back_with_three_ranks(options):
    first, *others = run_ranks(through_dense_and_back, 3, False, OPTIONS[options])
    assert all(first == other for other in others)
    assert max(first) > 0
    assert first[-1] == 0, "compressed again"


def half_precision(rank: int, dtype: torch.dtype) -> list[int]:
    capacity._DENSE_EXCHANGES = 5
    watched = Watched(dtype, False)
    return [
        watched.step(as_large_as_they_come(rank, step, dtype), f"step {step}") for step in range(17)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_half_gradients_of_which_all_are_needed_are_dense_by_default(world_size, dtype):
    # 2 bytes an element either way with bins of 64, and the headers on top.
    first, *others = run_ranks(half_precision, world_size, dtype)
    assert all(first == other for other in others)
    buckets = max(first)
    # One bucket before DDP's rebuild; then three compressed exchanges, five dense ones, and so on.
    assert first == [0] + ([0] * 3 + [buckets] * 5) * 2


def never(rank: int) -> None:
    _, state = run_of_large_ones(rank, dense_fallback=None)
    assert state.stats()["fallbacks"] == 0
    _, state = run_of_large_ones(rank)
    assert state.stats()["fallbacks"] > 0


def run_of_large_ones(rank: int, **options: Any) -> tuple[GivenGradients, AdaCompState]:
    module = GivenGradients(torch.float16)
    ddp, state = hooked(module, **options)
    for step in range(6):
        module.zero_grad()
        ddp(as_large_as_they_come(rank, step, torch.float16)).backward()
    return module, state


def test_without_dense_fallback_every_exchange_is_compressed():
    run_ranks(never, 2)


def in_dense(rank: int, **options: Any) -> tuple[Any, GivenGradients, AdaCompState]:
    """A module of which every bucket's next exchange is dense, with residuals."""
    module = GivenGradients()
    ddp, state = hooked(module, options.pop("ddp", {}), dense_fallback=1e-3, **options)
    ddp(random_gradients(rank, 0)).backward()
    fill(state, rank)
    module.zero_grad()
    return ddp, module, state


def fill(state: AdaCompState, rank: int) -> None:
    for device in state._residuals.flat.values():
        device.copy_(torch.arange(device.numel()) % 7 - 3.0 + rank)


def all_dense(state: AdaCompState) -> bool:
    last = [e for e in state._exchanges.values() if e.last_step == state._step]
    return all(e._shares is not None for e in last)


def unused(rank: int) -> None:
    ddp, module, state = in_dense(rank, ddp={"find_unused_parameters": True})
    grads: list[Tensor | None] = list(random_gradients(rank, 1))
    grads[2] = None  # on every rank
    if rank == 1:
        grads[4] = None  # here only
    before = residuals_of(state, module)
    ddp(grads).backward()
    assert all_dense(state)
    after = residuals_of(state, module)
    assert module.second.grad is None
    assert torch.equal(before["second"], after["second"])
    assert torch.equal(before["third"], after["third"]) == (rank == 1)
    own = torch.zeros(96, 32) if rank == 1 else before["third"] + grads[4]
    mean = sum(gather_all(own)) / dist.get_world_size()
    assert torch.allclose(mean, module.third.grad, atol=1e-6)
    assert float(after["first"].abs().max()) < 1e-5


@pytest.mark.parametrize("world_size", [2, 3])
def test_unused_parameters_lose_no_residual_in_a_dense_exchange(world_size):
    run_ranks(unused, world_size)


def not_finite(rank: int) -> None:
    ddp, module, state = in_dense(rank)
    for step in (1, 2):
        module.zero_grad()
        before = residuals_of(state, module)
        grads = random_gradients(rank, step)
        if step == 1 and rank == 1:
            grads[0][5, 5] = float("inf")
        ddp(grads).backward()
        assert all_dense(state)
        spoilt = (~torch.isfinite(module.first.grad)).nonzero().tolist()
        assert spoilt == ([[5, 5]] if step == 1 else [])
        after = residuals_of(state, module)
        assert all(torch.isfinite(r).all() for r in after.values())
        if step == 1 and rank == 1:
            assert after["first"][5, 5] == before["first"][5, 5] != 0
        assert_equal_on_all_ranks([p.grad for p in module.parameters()], f"step {step}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_non_finite_gradient_shows_on_all_ranks_and_passes(world_size):
    run_ranks(not_finite, world_size)


def discarded(rank: int) -> None:
    ddp, module, state = in_dense(rank)
    before = residuals_of(state, module)
    grads = [g.mul(8).round() / 8 for g in random_gradients(rank, 1)]
    ddp(grads).backward()
    assert all_dense(state)
    for _ in range(2):  # the second call does nothing
        state.restore_skipped_step()
        after = residuals_of(state, module)
        for (name, _), grad in zip(named(module), grads, strict=True):
            if name not in ("bias", "scalar"):
                assert torch.equal(after[name], before[name] + grad), name


def test_a_dense_exchange_that_is_discarded_is_put_back_once():
    run_ranks(discarded, 2)


def joined(rank: int) -> None:
    ddp, module, state = in_dense(rank)
    optimizer = torch.optim.SGD(module.parameters(), 1.0)
    owed = sum(gather_all(state.residual("third"))) / dist.get_world_size()
    given = torch.zeros(96, 32)
    with ddp.join():
        for step in range(1 + 2 * rank):
            optimizer.zero_grad()
            grads = random_gradients(rank, step)
            given += grads[4] / dist.get_world_size()
            ddp(grads).backward()
            optimizer.step()
    assert_equal_on_all_ranks(list(module.parameters()), "parameters")
    left = sum(gather_all(state.residual("third"))) / dist.get_world_size()
    assert torch.allclose(left - module.third, owed + sum(gather_all(given)), atol=1e-4)
    if rank == 0:  # it shadowed the others with gradients of zero
        assert state.residual("third").abs().max() < 1e-4
    assert state.stats()["fallbacks"] > 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_join_loses_nothing_in_dense_exchanges(world_size):
    run_ranks(joined, world_size)


def loaded(rank: int) -> None:
    capacity._DENSE_EXCHANGES = 10**6
    watched = Watched(torch.float32, False, dense_fallback=0.1)
    for step in range(6):
        dense = watched.step(as_large_as_they_come(rank, step, torch.float32), f"step {step}")
    assert dense > 0
    watched.state.load_state_dict(watched.state.state_dict())
    # Capacities start afresh: compressed, until the headers say what they said before.
    for step in range(6, 12):
        dense = watched.step(as_large_as_they_come(rank, step, torch.float32), f"step {step}")
        assert (dense > 0) == (step >= 9), f"step {step}"


def test_a_loaded_state_tries_compressing_first():
    run_ranks(loaded, 2)
