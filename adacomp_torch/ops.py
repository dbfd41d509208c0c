"""The codec: one bucket's gradient and residuals to one payload, and all ranks' payloads back.

The kernels are in csrc/; `adacomp_torch.reference` is their specification in plain torch. They are
registered as `torch.ops.adacomp.*`, and everything is checked there, before anything is written:
a wrong argument raises RuntimeError with its name, what was expected and what came.

Shapes and dtypes, common to all functions:

- `grad`: [numel], float32, float16 or bfloat16, contiguous. One bucket, parameter after parameter.
- `residual`: [any], float32, contiguous. Holds each compressed parameter's residual somewhere.
- `layout`: [segments, 4], int64, CPU. One row (bucket_offset, numel, bin_size, residual_offset) per
  parameter; rows tile `grad` in order; bin_size 0 and residual_offset -1 mean raw float32 values.
  `adacomp_torch.layout.make_layout` builds one.
- `payload`: [capacity], uint8, aligned to 16 bytes; capacity is a multiple of 16 from `fixed` (see
  `payload_capacity`) to 2**32 - 16.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from . import _C

Scale = Literal["layer", "bin"]


def has_bin_scales(scale: str) -> bool:
    """Translates the option `scale`; ValueError if it is neither "layer" nor "bin"."""
    if scale not in ("layer", "bin"):
        raise ValueError(f"scale: expected 'layer' or 'bin', got {scale!r}")
    return scale == "bin"


def payload_capacity(layout: Tensor, *, scale: Scale = "layer") -> tuple[int, int]:
    """Returns (fixed, worst_case) bytes of a payload, both multiples of 16.

    `fixed` is everything but the entries and the least capacity that `compress` accepts;
    with `worst_case` nothing can be dropped, whatever the gradient.
    """
    fixed, worst_case = torch.ops.adacomp.payload_capacity(layout, has_bin_scales(scale)).tolist()
    return fixed, worst_case


@torch.library.register_fake("adacomp::payload_capacity")
def _(layout: Tensor, bin_scales: bool) -> Tensor:
    return layout.new_empty(2)


def compress(
    grad: Tensor,
    residual: Tensor,
    layout: Tensor,
    payload: Tensor,
    *,
    step: int = 0,
    scale: Scale = "layer",
    threshold_factor: float = 2.0,
    counters: Tensor | None = None,
) -> None:
    """Writes `payload` (all of it) and updates `residual`; the paper's `pack()`, Algorithm 2.

    Per parameter, with dW its gradient and L_T = bin_size elements per bin:

        G = residual + dW;  H = G + (threshold_factor - 1) dW;  g_max = max |G| over each bin
        send j iff g_max > 0, |H(j)| >= g_max, G(j) != 0;  s = mean of g_max over its bins
        residual(j) = G(j) - sign(G(j)) s if sent, else G(j)

    Args:
        step: number of the step, >= 0; the receivers must pass the same. Decides which chunks are
            dropped (their residual is then exactly G) if the entries do not fit into `payload`.
        scale: "layer" sends one s per parameter; "bin" one byte per bin instead, with s the bin's
            own g_max rounded to two steps per octave.
        threshold_factor: finite, >= 1. 1.0 is the paper's local selection.
        counters: [segments, 2], int64: entries sent and chunks dropped are added per parameter.
    """
    torch.ops.adacomp.compress(
        grad, residual, layout, payload, counters, step, has_bin_scales(scale), threshold_factor
    )


@torch.library.register_fake("adacomp::compress")
def _(*_args: Any) -> None:
    return None


def decompress(
    payloads: Tensor,
    grad: Tensor,
    layout: Tensor,
    *,
    step: int = 0,
    scale: Scale = "layer",
    threshold_factor: float = 2.0,
    status: Tensor | None = None,
) -> None:
    """Overwrites `grad` with the mean of what the ranks sent; the paper's `unpack()`, Algorithm 2.

    The sum is taken in float32 in rank order, divided by world_size and rounded once to the dtype
    of `grad`: every rank gets the same bits.

    Args:
        payloads: [world_size, capacity], uint8: what `compress` wrote on each rank.
        step, scale, threshold_factor: as given to `compress`.
        status: [1], int64: set to a word that encodes rank and field of the first malformed payload
            unless it is set already. `grad` is then NaN everywhere, and on the CPU RuntimeError is
            raised that names them.
    """
    if status is None:
        status = torch.zeros(1, dtype=torch.int64, device=grad.device)
    torch.ops.adacomp.decompress(
        payloads, grad, layout, status, step, has_bin_scales(scale), threshold_factor
    )


@torch.library.register_fake("adacomp::decompress")
def _(*_args: Any) -> None:
    return None


def restore(
    payload: Tensor,
    residual: Tensor,
    layout: Tensor,
    condition: Tensor,
    *,
    dtype: torch.dtype,
    step: int = 0,
    scale: Scale = "layer",
    threshold_factor: float = 2.0,
) -> None:
    """Adds to `residual` what `compress` took off it for `payload`, for a step that is discarded.

    The residual is then G up to one float32 rounding per element sent: residual + sign(G) s.

    Args:
        payload: [capacity], uint8: what `compress` wrote on this rank.
        condition: [1], bool, on the device of `residual`: if it is False nothing is done.
        dtype: of the gradient that was compressed.
        step, scale, threshold_factor: as given to `compress`.
    """
    torch.ops.adacomp.restore(
        payload, residual, layout, condition, dtype, step, has_bin_scales(scale), threshold_factor
    )


@torch.library.register_fake("adacomp::restore")
def _(*_args: Any) -> None:
    return None


def inspect_payload(payload: Tensor, layout: Tensor | None = None) -> dict[str, Any]:
    """Header fields of a payload ([capacity], uint8, CPU), for tests and debugging.

    With its `layout` also `fixed_bytes`, `scales` (one per parameter) and `chunk_table` (offsets).
    Nothing is validated but the size: `decompress` does that.
    """
    return _C.inspect_payload(payload, layout)
