"""A short soak, and that a soak finds what is broken."""

from __future__ import annotations

from typing import Any

import pytest
import soak
import torch

from adacomp_torch import AdaCompState, exchange, ops

SEED = 7


def wrong_decode(rank: int, seed: int) -> tuple[int, int]:
    def decompress(payloads: torch.Tensor, grad: torch.Tensor, *args: Any, **options: Any) -> None:
        ops.decompress(payloads, grad, *args, **options)
        grad[-1:] += 1.0

    exchange.ops = type("ops", (), {**vars(ops), "decompress": staticmethod(decompress)})
    return soak.episode(rank, seed)


def other_bits_on_one_rank(rank: int, seed: int) -> tuple[int, int]:
    def decompress(payloads: torch.Tensor, grad: torch.Tensor, *args: Any, **options: Any) -> None:
        ops.decompress(payloads, grad, *args, **options)
        if rank == 1:
            grad *= 1 + torch.finfo(grad.dtype).eps

    exchange.ops = type("ops", (), {**vars(ops), "decompress": staticmethod(decompress)})
    return soak.episode(rank, seed)


def residuals_forgotten(rank: int, seed: int) -> tuple[int, int]:
    settle = AdaCompState._settle

    def forget(self: AdaCompState) -> None:
        settle(self)
        for residual in self._residuals.flat.values():
            residual.zero_()

    AdaCompState._settle = forget
    return soak.episode(rank, seed)


@pytest.mark.parametrize("broken", [wrong_decode, other_bits_on_one_rank, residuals_forgotten])
def test_the_soak_finds(broken, capsys):
    assert soak.main(["--seed", str(SEED), "--episodes", "20"], broken) == 1
    assert "to repeat: python tests/soak.py --episodes 1 --seed " in capsys.readouterr().out


def test_a_few_episodes(capsys):
    assert soak.main(["--seed", str(SEED), "--episodes", "20", "--minutes", "5"]) == 0
    assert "20 episodes from seed 7" in capsys.readouterr().out
