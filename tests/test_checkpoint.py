"""state_dict and load_state_dict: bit-equal resume, refusals, another world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_equal_on_all_ranks, gather_all, wrap
from ranks import run_ranks
from torch import Tensor, nn

from adacomp_torch import AdaCompState, adacomp_hook


class Training:
    """A small classifier with momentum: whatever is not restored shows in its parameters."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.module = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))
        self.ddp = wrap(self.module)
        self.state = AdaCompState(self.ddp, bin_size=32)
        self.ddp.register_comm_hook(self.state, adacomp_hook)
        self.optimizer = torch.optim.SGD(self.module.parameters(), 0.1, momentum=0.9)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(100 * step + self.rank)
            x = torch.randn(16, 24, generator=generator)
            self.optimizer.zero_grad()
            (self.ddp(x) - x.roll(1, 1)).square().mean().backward()
            self.optimizer.step()
        assert_equal_on_all_ranks(list(self.module.parameters()), "parameters")

    def checkpoint(self) -> dict[str, Any]:
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "adacomp": self.state.state_dict(),
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state.load_state_dict(saved["adacomp"])

    def outcome(self) -> list[Tensor]:
        residuals = self.state.state_dict()["residuals"].values()
        return [p.detach().clone() for p in self.module.parameters()] + list(residuals)


def first_half(rank: int, directory: Path) -> None:
    training = Training(rank)
    training.steps(0, 5)
    torch.save(training.checkpoint(), directory / f"rank{rank}.pt")
    stats = training.state.stats()
    assert 0 < stats["bytes_sent"] < stats["dense_bytes"]
    assert stats["dropped_chunks"] == 0


def second_half(rank: int, directory: Path) -> list[Tensor]:
    training = Training(rank)
    training.load(torch.load(directory / f"rank{rank}.pt"))  # weights_only=True is the default
    training.steps(5, 10)
    assert training.state.state_dict()["step"] == 10
    stats = training.state.stats()
    assert stats["steps"] == 5
    assert stats["dropped_chunks"] == 0
    return training.outcome()


def whole(rank: int) -> list[Tensor]:
    training = Training(rank)
    training.steps(0, 10)
    assert training.state.stats()["dropped_chunks"] == 0
    return training.outcome()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ten_steps_equal_five_and_five_in_new_processes(world_size, tmp_path):
    # Fault 33.
    run_ranks(first_half, world_size, tmp_path)
    resumed = run_ranks(second_half, world_size, tmp_path)
    for ours, theirs in zip(resumed, run_ranks(whole, world_size), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(resumed[0], resumed[1], strict=True))


def refused(rank: int, directory: Path, change: str) -> str:
    training = Training(rank)
    before = training.outcome()
    saved = torch.load(directory / f"rank{rank}.pt")["adacomp"]
    if rank == 1 or change == "world_size":
        if change == "rank":
            saved = torch.load(directory / "rank0.pt")["adacomp"]
        elif change == "world_size":
            saved["world_size"] = 3
        elif change == "shape":
            saved["residuals"]["0.weight"] = torch.zeros(3, 3)
        elif change == "missing":
            del saved["residuals"]["2.weight"]
        elif change == "unknown":
            saved["residuals"]["9.weight"] = torch.zeros(3)
        elif change == "non-finite":
            saved["residuals"]["0.weight"][0, 0] = float("nan")
        elif change == "dtype":
            saved["residuals"]["0.weight"] = saved["residuals"]["0.weight"].half()
        elif change == "format":
            saved["format"] = 99
        elif change == "step":
            saved["step"] += 1
        elif change == "loss_scale":
            saved["loss_scale"] = 0.0
        elif change == "nothing":
            saved = {}
    with pytest.raises((ValueError, RuntimeError)) as caught:
        training.state.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(before, training.outcome(), strict=True))
    # The ranks are still together.
    training.steps(0, 2)
    return str(caught.value)


REFUSALS = {
    "rank": "expected rank 1, got 0",
    "world_size": "expected world_size 2, got 3; merge_state_dicts makes one state",
    "shape": "expected residual '0.weight' of (64, 24), got (3, 3)",
    "missing": "expected a residual of '2.weight' in both, got none in the state_dict",
    "unknown": "expected a residual of '9.weight' in both, got none in the model",
    "non-finite": "expected finite values in residual '0.weight', got inf or NaN",
    "dtype": "expected residual '0.weight' in float32, got torch.float16",
    "format": "expected format 1, got 99",
    "step": "ranks differ in step: rank 0 has 5, rank 1 has 6",
    "loss_scale": "expected loss_scale as a finite float > 0, got 0.0",
    "nothing": "expected format 1, got nothing",
}


@pytest.mark.parametrize("change", REFUSALS)
def test_a_state_that_does_not_fit_is_refused_on_every_rank_and_changes_nothing(change, tmp_path):
    run_ranks(first_half, 2, tmp_path)
    for said in run_ranks(refused, 2, tmp_path, change):
        assert REFUSALS[change] in said


def with_merged(rank: int, directory: Path) -> list[Tensor]:
    training = Training(rank)
    saved = [torch.load(directory / f"rank{r}.pt") for r in range(2)]
    merged = dict(saved[0], adacomp=AdaCompState.merge_state_dicts([s["adacomp"] for s in saved]))
    with pytest.warns(UserWarning, match="mean of the saved ranks' residuals"):
        training.load(merged)
    for name, residual in training.state.state_dict()["residuals"].items():
        mean = sum(s["adacomp"]["residuals"][name].double() for s in saved) / 2
        assert torch.equal(residual, mean.float())
        over_ranks = sum(gather_all(residual)) / dist.get_world_size()
        assert torch.allclose(over_ranks, mean.float())
    training.steps(5, 8)
    assert training.state.state_dict()["step"] == 8


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_merged_state_keeps_the_mean_residual_at_another_world_size(world_size, tmp_path):
    # Fault 34.
    run_ranks(first_half, 2, tmp_path)
    run_ranks(with_merged, world_size, tmp_path)


def state(
    rank: int,
    world_size: int = 2,
    step: int = 5,
    loss_scale: float = 1.0,
    **residuals: Tensor,
) -> dict[str, Any]:
    return {
        "format": 1,
        "rank": rank,
        "world_size": world_size,
        "step": step,
        "loss_scale": loss_scale,
        "residuals": residuals or {"w": torch.ones(3)},
    }


MERGES = {
    "nothing": ([], "expected one state of each rank"),
    "no states": ([None], "expected mappings with format, loss_scale"),
    "empty states": ([{}], "expected mappings with format, loss_scale"),
    "one of two": ([state(0)], "expected one state of each rank, got ranks [0]"),
    "twice the same": ([state(1), state(1)], "expected one state of each rank, got ranks [1, 1]"),
    "another step": (
        [state(0), state(1, step=6)],
        "expected step 5 on every rank, got 6 on rank 1",
    ),
    "another loss scale": (
        [state(0), state(1, loss_scale=2.0)],
        "expected loss_scale 1.0 on every rank, got 2.0 on rank 1",
    ),
    "another name": ([state(0), state(1, v=torch.ones(3))], "expected a residual of 'w' in both"),
    "another shape": (
        [state(0), state(1, w=torch.ones(2))],
        "expected residual 'w' of (3,), got (2",
    ),
}


@pytest.mark.parametrize("what", MERGES)
def test_merging_refuses_what_is_not_one_run(what):
    states, message = MERGES[what]
    with pytest.raises(ValueError, match=".*") as caught:
        AdaCompState.merge_state_dicts(states)
    assert message in str(caught.value)
