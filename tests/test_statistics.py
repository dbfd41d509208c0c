"""How many entries independent gradients give, and how that depends on threshold_factor."""

from __future__ import annotations

import pytest
import torch

from adacomp_torch import ops
from adacomp_torch.layout import make_layout

SHIFTS = 2_000_000


class Noise:
    """Independent gradients: windows of one random pool at random places; quicker than draws."""

    def __init__(self, law: str, numel: int) -> None:
        torch.manual_seed(0)
        self.numel = numel
        self.pool = torch.randn(numel + SHIFTS)
        if law == "laplace":
            self.pool.exponential_().mul_(torch.randint(2, self.pool.shape) * 2 - 1)

    def draw(self) -> torch.Tensor:
        return self.pool[int(torch.randint(SHIFTS, ())) :][: self.numel]


def entries_per_bin(
    law: str, bin_size: int, bins: int, steps: int, skip: int, factor: float = 2.0
) -> float:
    """Mean over steps `skip` to `steps`."""
    numel = bins * bin_size
    layout = make_layout([numel], [bin_size])
    payload = torch.empty(ops.payload_capacity(layout)[1], dtype=torch.uint8)
    residual = torch.zeros(numel)
    noise = Noise(law, numel)
    counters = torch.zeros((1, 2), dtype=torch.int64)
    for step in range(steps):
        if step == skip:
            counters.zero_()
        ops.compress(
            noise.draw(),
            residual,
            layout,
            payload,
            step=step,
            threshold_factor=factor,
            counters=counters,
        )
    return int(counters[0, 0]) / bins / (steps - skip)


STEADY = {
    (50, "gaussian"): 4.98,
    (50, "laplace"): 3.89,
    (500, "gaussian"): 5.98,
    (500, "laplace"): 5.03,
    (5000, "gaussian"): 5.98,
    (5000, "laplace"): 4.98,
}


@pytest.mark.parametrize(("bin_size", "law"), STEADY)
def test_steady_state_entries_per_bin(bin_size, law):
    # Steady after about as many steps as it takes to send every element once.
    bins, steps, skip = {50: (4000, 160, 40), 500: (500, 600, 200), 5000: (100, 3000, 1000)}[
        bin_size
    ]
    mean = entries_per_bin(law, bin_size, bins, steps, skip)
    assert mean == pytest.approx(STEADY[bin_size, law], rel=0.04)


@pytest.mark.parametrize(("bin_size", "bins"), [(50, 40_000), (500, 16_000), (5000, 4000)])
def test_first_step_entries_per_bin(bin_size, bins):
    """With no residual yet, all elements of at least half the maximum M go: of n Gaussians
    1 + (n - 1) P(|x| >= M/2 given |x| <= M), in the mean over M 11.05, 55.12 and 283.8."""
    m = torch.linspace(1e-4, 8, 200_001, dtype=torch.float64)
    below, half_below = torch.erf(m / 2**0.5), torch.erf(m / 2**1.5)
    expected = torch.trapezoid(1 + (bin_size - 1) * (below - half_below) / below, below**bin_size)
    mean = entries_per_bin("gaussian", bin_size, bins, 1, 0)
    assert mean == pytest.approx(float(expected), rel=0.01)


SWEEP = {
    (1.0, 50): 1.00, (1.5, 50): 2.05, (2.5, 50): 8.1, (3.0, 50): 9.8,
    (1.0, 500): 1.00, (1.5, 500): 2.06, (2.5, 500): 19.5, (3.0, 500): 36.7,
}  # fmt: skip


@pytest.mark.parametrize(("factor", "bin_size"), SWEEP)
def test_threshold_factor_sweep(factor, bin_size):
    bins, steps, skip = (4000, 160, 40) if bin_size == 50 else (500, 600, 200)
    mean = entries_per_bin("gaussian", bin_size, bins, steps, skip, factor)
    assert mean == pytest.approx(SWEEP[factor, bin_size], rel=0.04)
