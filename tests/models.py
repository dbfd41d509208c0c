"""Models for the tests of the hook: gradients are given exactly, buckets come in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adacomp_torch import AdaCompState, adacomp_hook

BIN_SIZE = 64


class GivenGradients(nn.Module):
    """Parameters whose gradients are exactly the tensors passed to `forward`.

    They are used in another order than defined, and with `bucket_cap_mb=0.01` (see `wrap`) there
    are several buckets, so that DDP's rebuild after the first step really moves them.
    """

    SHAPES = (
        ("first", (40, 64)),
        ("bias", (5,)),
        ("second", (2, 32, 64)),
        ("scalar", ()),
        ("third", (96, 32)),
        ("fourth", (1024,)),
    )
    ORDER = (2, 4, 0, 5, 3, 1)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in self.SHAPES:
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        parameters = list(self.parameters())
        total = torch.zeros((), dtype=parameters[0].dtype)
        for i in self.ORDER:
            grad = grads[i]
            if grad is not None:
                total = total + (parameters[i] * grad).sum()
        return total


def wrap(module: nn.Module, **options: object) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=0.01, **options)


def exact_gradients(rank: int, step: int, seed: int = 0) -> list[Tensor]:
    """Small multiples of 1/8 for which AdaComp's arithmetic is exact with bins of BIN_SIZE.

    Every bin holds the same values under a permutation that is fixed for the run, so that all
    maxima of a parameter are equal and their mean needs no more bits than they do.
    """
    values = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    grads = []
    for index, (_, shape) in enumerate(GivenGradients.SHAPES):
        numel = torch.Size(shape).numel()
        bins = max(1, numel // BIN_SIZE)
        orders = torch.Generator().manual_seed(index)
        base = torch.randint(-16, 17, (min(numel, BIN_SIZE),), generator=values) / 8
        rows = [base[torch.randperm(len(base), generator=orders)] for _ in range(bins)]
        grads.append(torch.cat(rows).reshape(shape))
    return grads


def random_gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator).to(dtype) for _, shape in GivenGradients.SHAPES]


def gather_all(tensor: Tensor) -> list[Tensor]:
    """Every rank's `tensor`, on every rank."""
    tensor = tensor.detach().contiguous()
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return gathered


def assert_equal_on_all_ranks(tensors: Sequence[Tensor], what: str) -> None:
    flat = torch.cat([t.detach().flatten().float() for t in tensors]).view(torch.int32)
    for rank, other in enumerate(gather_all(flat)):
        assert torch.equal(flat, other), f"{what}: rank {rank} has other bits"


BINS = {"bias": None, "scalar": None, "*": BIN_SIZE}  # the first match wins


def hooked(module: nn.Module, ddp_options: dict[str, Any] | None = None, **options: Any):
    ddp = wrap(module, **(ddp_options or {}))
    state = AdaCompState(ddp, **{"bin_size": BINS, **options})
    ddp.register_comm_hook(state, adacomp_hook)
    return ddp, state


def assert_compressed(state: AdaCompState) -> dict[str, Any]:
    """The compressor was entered: else a test of the hook could pass on a dense exchange."""
    stats = state.stats()
    assert 0 < stats["bytes_sent"] < stats["dense_bytes"]
    assert stats["entries_per_bin"] > 0
    return stats


def residuals_of(state: AdaCompState, module: nn.Module) -> dict[str, Tensor]:
    return {
        name: state.residual(name).clone()
        if name not in ("bias", "scalar")
        else torch.zeros(p.shape)
        for name, p in module.named_parameters()
    }


def named(module: nn.Module) -> list[tuple[str, Tensor]]:
    return list(module.named_parameters())
