"""Buckets for the codec's tests: ugly sizes and gradients, and both implementations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adacomp_torch import ops, reference
from adacomp_torch.layout import make_layout

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCALES: tuple[ops.Scale, ...] = ("layer", "bin")
BIN_SIZES = (1, 2, 49, 50, 63, 64, 500, 5000, 16383)


def ugly_numels(bin_size: int) -> list[int]:
    """Around the bin, around the chunk, and primes."""
    chunk = max(1, 4096 // bin_size) * bin_size
    sizes = {0, 1, 2, bin_size - 1, bin_size, bin_size + 1, 2 * bin_size + 3, 509}
    sizes |= {chunk - 1, chunk, chunk + 1, 2 * chunk + bin_size + 1}
    return sorted(sizes)


def gradient(kind: str, numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    grad = torch.randn(numel, generator=generator)
    if kind == "ties":  # few distinct values: many elements equal to the bin's maximum
        grad = (2 * grad).round().clamp(-2, 2)
    elif kind == "rare":  # most bins all zero
        grad = grad * (torch.rand(numel, generator=generator) < 0.002)
    elif kind == "wide":  # from flush-to-zero to overflow of the half types
        grad = grad * torch.exp2(torch.randint(-140, 120, (numel,), generator=generator).float())
    elif kind == "non_finite" and numel > 0:
        spoil = torch.randint(numel, (2,), generator=generator)
        grad[spoil] = torch.tensor([float("inf"), float("nan")])
    elif kind == "zero":
        grad = torch.zeros(numel)
    if dtype == torch.float16 and kind == "wide":
        grad = grad.clamp(-65504, 65504)
    return grad.to(dtype)


GRADIENTS = ("normal", "ties", "rare", "wide", "non_finite", "zero")


def bits(tensor: Tensor) -> Tensor:
    """The bit pattern: NaN equals NaN, and 0.0 differs from -0.0."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def assert_same_bits(actual: Tensor, expected: Tensor, what: str) -> None:
    different = (bits(actual) != bits(expected)).nonzero().flatten().tolist()
    assert not different, (
        f"{what}: {len(different)} of {len(actual)} elements differ, the first at {different[0]}: "
        f"{actual[different[0]].item()!r} instead of {expected[different[0]].item()!r}"
    )


class Pair:
    """The ops and the reference on the same ranks' gradients, compared after every step."""

    def __init__(
        self,
        numels: Sequence[int],
        bin_sizes: Sequence[int | None],
        *,
        dtype: torch.dtype = torch.float32,
        scale: ops.Scale = "layer",
        threshold_factor: float = 2.0,
        world_size: int = 2,
        room: float = 1.0,
    ) -> None:
        self.layout = make_layout(numels, bin_sizes)
        self.numel = sum(numels)
        self.dtype = dtype
        self.options = {"scale": scale, "threshold_factor": threshold_factor}
        fixed, worst_case = ops.payload_capacity(self.layout, scale=scale)
        capacity = fixed + int((worst_case - fixed) * room) // 16 * 16
        residual = sum(n for n, b in zip(numels, bin_sizes, strict=True) if b is not None)
        self.residuals = {
            kind: [torch.zeros(residual) for _ in range(world_size)] for kind in ("ops", "ref")
        }
        # Dirty buffers: whatever is not written shows.
        self.payloads = {
            kind: torch.full((world_size, capacity), 0xFF, dtype=torch.uint8)
            for kind in ("ops", "ref")
        }
        self.counters = torch.zeros((len(numels), 2), dtype=torch.int64)

    def step(self, grads: Sequence[Tensor], step: int) -> Tensor:
        """Compresses and decodes with both, asserts equal bits, returns the decoded gradient."""
        for rank, grad in enumerate(grads):
            args = {"step": step, **self.options}
            ops.compress(
                grad,
                self.residuals["ops"][rank],
                self.layout,
                self.payloads["ops"][rank],
                counters=self.counters,
                **args,
            )
            reference.compress(
                grad, self.residuals["ref"][rank], self.layout, self.payloads["ref"][rank], **args
            )
            mine, theirs = self.payloads["ops"][rank], self.payloads["ref"][rank]
            different = (mine != theirs).nonzero().flatten().tolist()
            assert not different, f"payload of rank {rank}: bytes differ at {different[:8]}"
            assert_same_bits(
                self.residuals["ops"][rank], self.residuals["ref"][rank], f"residual {rank}"
            )
        decoded = {
            kind: torch.full((self.numel,), 7.0, dtype=self.dtype) for kind in ("ops", "ref")
        }
        ops.decompress(self.payloads["ops"], decoded["ops"], self.layout, step=step, **self.options)
        reference.decompress(
            self.payloads["ref"], decoded["ref"], self.layout, step=step, **self.options
        )
        assert_same_bits(decoded["ops"], decoded["ref"], "decoded gradient")
        return decoded["ops"]
