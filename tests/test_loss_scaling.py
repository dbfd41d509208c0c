"""Loss scaling: residuals follow the scale; a skipped step loses nothing but what overflowed."""

from __future__ import annotations

from pathlib import Path
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
    residuals_of,
    wrap,
)
from ranks import run_ranks
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_hook,
    fp16_compress_wrapper,
)

from adacomp_torch import AdaCompState, adacomp_hook, exchange


def scaler_of(init_scale: float = 2.0**12, growth_interval: int = 2) -> GradScaler:
    return GradScaler("cpu", init_scale=init_scale, growth_interval=growth_interval)


class Ledger:
    """One module trained with a scaler; knows what must have been applied or still be owed.

    The optimizer is SGD with rate 1, so that a parameter is minus the sum of what was applied.
    """

    def __init__(
        self, rank: int, scaler: GradScaler, seed: int = 0, half: bool = False, **options: Any
    ) -> None:
        self.rank, self.scaler, self.seed, self.half = rank, scaler, seed, half
        self.module = GivenGradients()
        self.ddp = wrap(self.module)
        bins = {"bias": None, "scalar": None, "*": 64}
        self.state = AdaCompState(self.ddp, bin_size=bins, grad_scaler=scaler, **options)
        hook = fp16_compress_wrapper(adacomp_hook) if half else adacomp_hook
        self.ddp.register_comm_hook(self.state, hook)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.given = [torch.zeros(shape) for _, shape in GivenGradients.SHAPES]
        self.skipped = 0

    def backward(self, step: int, spoilt: bool) -> None:
        """`spoilt`: the first parameter of rank 1 overflows."""
        self.optimizer.zero_grad()
        grads = exact_gradients(self.rank, step, self.seed)
        if spoilt and self.rank == 1:
            grads[0].fill_(1e4 if self.half else float("inf"))
        scale = self.scaler.get_scale() if step > 0 else self.scaler._init_scale
        self.scaler.scale(self.ddp(grads)).backward()
        # Raw parameters have no residual: like dense training they lose a skipped step.
        overflown = [self._sent_as(g, scale) for g in grads]
        self.skips = not all(
            bool(torch.isfinite(other).all())
            for other in gather_all(torch.cat([g.flatten() for g in overflown]))
        )
        for total, grad, sent, (name, _) in zip(
            self.given, grads, overflown, named(self.module), strict=True
        ):
            if not self.skips or name not in ("bias", "scalar"):
                total += torch.where(torch.isfinite(sent), grad, 0.0)

    def _sent_as(self, grad: Tensor, scale: float) -> Tensor:
        return (grad * scale).half() if self.half else grad * scale

    def step(self) -> None:
        before = [p.detach().clone() for p in self.module.parameters()]
        self.scaler.step(self.optimizer)
        stayed = all(
            torch.equal(a, b) for a, b in zip(before, self.module.parameters(), strict=True)
        )
        assert stayed == self.skips
        self.skipped += stayed

    def check(self, what: str) -> None:
        scale = self.scaler.get_scale()
        residuals = residuals_of(self.state, self.module)
        for total, (name, p) in zip(self.given, named(self.module), strict=True):
            residual = residuals[name]
            assert torch.isfinite(residual).all(), f"{name}, {what}"
            owed = sum(gather_all(residual / scale)) / dist.get_world_size()
            given = sum(gather_all(total)) / dist.get_world_size()
            assert torch.equal(owed - p.detach(), given), f"{name}, {what}"
        assert_equal_on_all_ranks(list(self.module.parameters()), what)


def scaled_training(rank: int, half: bool, dense_fallback: float) -> int:
    scaler = scaler_of(2.0**6 if half else 2.0**40)
    ledger = Ledger(rank, scaler, half=half, dense_fallback=dense_fallback)
    scales = []
    for step in range(14):
        ledger.backward(step, spoilt=step in (0, 5, 6, 9))
        ledger.step()
        scaler.update()
        scales.append(scaler.get_scale())
        if step % 3 != 1:  # a look at the residuals is not needed for them to be right
            ledger.check(f"step {step}, scale {scales[-1]}")
    assert len(set(scales)) > 2
    stats = ledger.state.stats()
    assert (stats["fallbacks"] > 0.5 * stats["exchanges"]) == (dense_fallback < 2)
    if dense_fallback == 2:
        assert_compressed(ledger.state)
    return ledger.skipped


@pytest.mark.parametrize("dense_fallback", [2.0, 0.01], ids=["compressed", "dense"])
@pytest.mark.parametrize("half", [False, True], ids=["float32", "fp16_compress_wrapper"])
def test_conservation_is_exact_across_scale_changes_and_skipped_steps(half, dense_fallback):
    # Besides fault 22: what was sent in a skipped step is put back.
    assert run_ranks(scaled_training, 2, half, dense_fallback) == [4, 4]


def two_modules_one_scaler(rank: int) -> None:
    scaler = scaler_of(growth_interval=3)
    one, other = Ledger(rank, scaler, seed=1), Ledger(rank, scaler, seed=2)
    for step in range(8):
        one.backward(step, spoilt=step in (2, 5))
        other.backward(step, spoilt=step in (3, 5))
        one.step()
        other.step()
        scaler.update()
        one.check(f"one, step {step}")
        other.check(f"other, step {step}")
    assert one.skipped == other.skipped == 2


def test_a_scaler_shared_by_two_modules_skips_each_by_itself():
    run_ranks(two_modules_one_scaler, 2)


def no_scaler_active(rank: int) -> None:
    scaler = GradScaler("cpu", enabled=False)
    module = GivenGradients()
    ddp, state = hooked(module, grad_scaler=scaler)
    for step in range(3):
        module.zero_grad()
        before = residuals_of(state, module)
        grads = exact_gradients(0, step)
        scaler.scale(ddp(grads)).backward()
        for (name, p), grad in zip(named(module), grads, strict=True):
            assert torch.equal(p.grad + state_residual(state, name), before[name] + grad)
    assert state.state_dict()["loss_scale"] == 1.0
    assert_compressed(state)


def state_residual(state: AdaCompState, name: str) -> Tensor | float:
    return 0.0 if name in ("bias", "scalar") else state.residual(name)


def test_a_disabled_scaler_changes_nothing():
    run_ranks(no_scaler_active, 1)


# ---- steps discarded by hand ---------------------------------------------------------------------


def discarded_by_hand(rank: int) -> None:
    module = GivenGradients()
    ddp, state = hooked(module)
    for step in range(4):
        module.zero_grad()
        before = residuals_of(state, module)
        grads = exact_gradients(rank, step)
        ddp(grads).backward()
        if step != 2:
            continue
        for _ in range(2):  # the second call does nothing
            state.restore_skipped_step()
            after = residuals_of(state, module)
            for (name, _), grad in zip(named(module), grads, strict=True):
                if name not in ("bias", "scalar"):
                    assert torch.equal(after[name], before[name] + grad), name
    assert_compressed(state)


def test_a_step_discarded_by_hand_is_put_back_once():
    run_ranks(discarded_by_hand, 2)


# ---- checkpoints ---------------------------------------------------------------------------------


def train(rank: int, first: int, last: int, folder: Path | None) -> list[Tensor]:
    """Steps [first, last); resumes from `folder` if first > 0, saves there if last < 10."""
    scaler = scaler_of(2.0**12, 3)
    ledger = Ledger(rank, scaler)
    if first > 0:
        saved: dict[str, Any] = torch.load(folder / f"{rank}.pt")
        ledger.module.load_state_dict(saved["model"])
        scaler.load_state_dict(saved["scaler"])
        ledger.state.load_state_dict(saved["adacomp"])
    for step in range(first, last):
        ledger.backward(step, spoilt=step in (2, 4, 7))
        ledger.step()
        scaler.update()
    state = ledger.state.state_dict()
    assert state["loss_scale"] == scaler.get_scale()
    if last < 10:
        saved = {
            "model": ledger.module.state_dict(),
            "scaler": scaler.state_dict(),
            "adacomp": state,
        }
        torch.save(saved, folder / f"{rank}.pt")
    assert assert_compressed(ledger.state)["dropped_chunks"] == 0
    return [*ledger.module.parameters(), *state["residuals"].values()]


def resumed_equals_uninterrupted(rank: int, folder: Path) -> None:
    exchange._DISTANCE = 100  # the first capacity throughout: nothing is dropped
    whole = train(rank, 0, 10, None)
    train(rank, 0, 5, folder)  # the last step before the save is a skipped one
    resumed = train(rank, 5, 10, folder)
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))


def test_a_resumed_run_with_a_scaler_has_the_same_bits(tmp_path):
    run_ranks(resumed_equals_uninterrupted, 2, tmp_path)


def loads_without_scaler(rank: int) -> None:
    scaler = scaler_of(growth_interval=100)
    ledger = Ledger(rank, scaler)
    for step in range(3):
        ledger.backward(step, spoilt=False)
        ledger.step()
        scaler.update()
    saved = ledger.state.state_dict()
    _, state = hooked(GivenGradients())
    state.load_state_dict(saved)
    for name, residual in saved["residuals"].items():
        assert torch.equal(state.residual(name) * saved["loss_scale"], residual)
    assert state.state_dict()["loss_scale"] == 1.0


def test_a_run_without_scaler_loads_residuals_in_units_of_one():
    run_ranks(loads_without_scaler, 2)


def only_one_rank_has_a_scaler(rank: int) -> str:
    ddp, _ = hooked(GivenGradients(), grad_scaler=scaler_of() if rank == 1 else None)
    with pytest.raises(RuntimeError) as caught:
        ddp(exact_gradients(rank, 0)).backward()
    return str(caught.value)


def test_a_scaler_on_one_rank_only_is_said_by_both():
    # Fault 11.
    for said in run_ranks(only_one_rank_has_a_scaler, 2):
        assert "ranks differ in grad_scaler: rank 0 has False, rank 1 has True" in said


# ---- learning ------------------------------------------------------------------------------------


def regression(rank: int, compress: bool) -> tuple[float, int, int]:
    """Final error of a small half-precision regression whose scale overflows again and again."""
    torch.manual_seed(0)
    target = nn.Linear(64, 32)
    module = nn.Linear(64, 32)
    scaler = scaler_of(2.0**20, growth_interval=5)
    ddp = wrap(module)
    state = None
    if compress:
        state = AdaCompState(ddp, bin_size=16, grad_scaler=scaler)
        ddp.register_comm_hook(state, fp16_compress_wrapper(adacomp_hook))
    else:
        ddp.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    inputs = torch.Generator().manual_seed(10 + rank)
    skipped, scales = 0, set()
    for _ in range(300):
        optimizer.zero_grad()
        x = torch.randn(32, 64, generator=inputs)
        loss = 100 * (ddp(x) - target(x).detach()).square().mean()
        scaler.scale(loss / 100).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < scale
        scales.add(scaler.get_scale())
    assert_equal_on_all_ranks(list(module.parameters()), "parameters")
    if state is not None:
        assert_compressed(state)
    with torch.no_grad():
        error = (module.weight - target.weight).square().mean() / target.weight.square().mean()
    return float(error), skipped, len(scales)


@pytest.mark.parametrize("compress", [False, True], ids=["dense", "AdaComp"])
def test_learning_converges_across_many_overflows_as_dense_training_does(compress):
    error, skipped, scales = run_ranks(regression, 2, compress)[0]
    assert skipped > 20
    assert scales > 5
    assert error < 1e-5
