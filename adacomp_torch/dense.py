"""A bucket's exchange where compressing does not pay: residual + gradient, all-reduced.

The mean over ranks then has only the rounding of the gradient's dtype, and what a rank's own share
loses in that rounding stays in its residual.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .layout import BucketParameter


def _parts(
    bucket: Tensor, residual: Tensor, parameters: Sequence[BucketParameter]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Views of each parameter's part of `bucket` and of its residual, if it has one."""
    offset = 0
    for p in parameters:
        part = bucket[offset : offset + p.numel]
        offset += p.numel
        kept = residual[p.residual_offset : p.residual_offset + p.numel]
        yield part, None if p.bin_size is None else kept


def take_shares(
    buffer: Tensor, residual: Tensor, parameters: Sequence[BucketParameter], world_size: int
) -> None:
    """Turns `buffer` ([numel], the gradients) into this rank's shares of the mean,
    (residual + gradient) / world_size, and takes what they carry off `residual`.

    As in a compressed exchange a parameter whose gradient is exactly zero keeps its residual: if it
    is unused on every rank, DDP throws the result away. Where residual + gradient is not finite the
    share is NaN and the residual stays. Shares are bounded so that their sum is finite.
    """
    info = torch.finfo(buffer.dtype)
    largest = info.max / (1 + world_size * info.eps)  # W roundings up must not reach infinity
    for part, kept in _parts(buffer, residual, parameters):
        if kept is None:
            part.div_(world_size)
            continue
        used = (part != 0).any()
        g = torch.where(used, part.float() + kept, 0.0)
        share = g.clamp(-largest, largest).div_(world_size)
        part.copy_(torch.where(g.isfinite(), share, torch.nan))
        left = g.sub_(part.float() * world_size)
        kept.copy_(torch.where(used & left.isfinite(), left, kept))


def put_back(
    shares: Tensor,
    residual: Tensor,
    parameters: Sequence[BucketParameter],
    world_size: int,
    condition: Tensor,
) -> None:
    """Adds to `residual` what `take_shares` took off it for `shares` if `condition` ([1], bool)."""
    for part, kept in _parts(shares, residual, parameters):
        if kept is not None:
            taken = part.float() * world_size
            kept.add_(torch.where(condition & taken.isfinite(), taken, 0.0))
