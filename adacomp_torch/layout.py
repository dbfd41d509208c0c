"""Layout tables: how a bucket is cut into parameters and bins; the bin size of each parameter."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from . import _C

RAW_BELOW = 512  # elements: below this the entries do not pay for their chunk table and scale

BinSizeFunction: TypeAlias = "Callable[[str, Tensor, nn.Module], int | None]"
BinSizeOption: TypeAlias = "int | Mapping[str, int | None] | BinSizeFunction"


@dataclass(frozen=True)
class BucketParameter:
    """A parameter's place; `residual_offset` is within its device's residual, -1 if sent raw."""

    name: str
    numel: int
    bin_size: int | None
    residual_offset: int


def chunk_count(numel: int, bin_size: int | None) -> int:
    """Chunks (the unit of what is dropped, about 4,096 elements) of one parameter."""
    if bin_size is None:
        return 0
    bins = -(-numel // bin_size)
    return -(-bins // max(1, 4096 // bin_size))


def make_layout(numels: Sequence[int], bin_sizes: Sequence[int | None]) -> Tensor:
    """Layout ([segments, 4], int64) of consecutive parameters whose residuals are consecutive too.

    `bin_sizes`: elements per bin of each parameter; None sends it raw, without a residual.
    """
    rows = []
    bucket_offset = residual_offset = 0
    for numel, bin_size in zip(numels, bin_sizes, strict=True):
        if bin_size is None:
            rows.append((bucket_offset, numel, 0, -1))
        else:
            rows.append((bucket_offset, numel, bin_size, residual_offset))
            residual_offset += numel
        bucket_offset += numel
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)


def default_bin_size(name: str, parameter: Tensor, module: nn.Module) -> int | None:
    """The paper's bin sizes (section 4): 50 for convolutions, 500 for fully connected and recurrent
    weights, here for embeddings too; 50 for vectors; and None (raw) below 512 elements.
    """
    if parameter.numel() < RAW_BELOW:
        return None
    return 500 if parameter.dim() == 2 else 50


def bin_size_function(option: BinSizeOption, names: Sequence[str]) -> BinSizeFunction:
    """The function (name, parameter, module) -> int | None behind the option `bin_size`.

    An int holds for every parameter of at least 512 elements; a mapping is matched by fnmatch, the
    first pattern that matches a name wins, and names without a match get the default.
    Raises ValueError for a pattern that matches none of `names`, TypeError for other types.
    """
    if isinstance(option, int) and not isinstance(option, bool):
        return lambda name, parameter, module: option if parameter.numel() >= RAW_BELOW else None
    if isinstance(option, Mapping):
        patterns = dict(option)
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                raise ValueError(
                    f"bin_size: expected patterns that match a parameter, got {pattern!r}; "
                    f"parameters are {', '.join(names)}"
                )

        def by_pattern(name: str, parameter: Tensor, module: nn.Module) -> int | None:
            for pattern, bin_size in patterns.items():
                if fnmatch.fnmatchcase(name, pattern):
                    return bin_size
            return default_bin_size(name, parameter, module)

        return by_pattern
    if callable(option):
        return option
    raise TypeError(
        "bin_size: expected an int, a mapping of name patterns or a callable, "
        f"got {type(option).__name__}"
    )


def checked_bin_size(name: str, bin_size: object) -> int | None:
    """Returns `bin_size` if it is None or an int the wire format allows; else raises by `name`."""
    if bin_size is None:
        return None
    if not isinstance(bin_size, int) or isinstance(bin_size, bool):
        raise TypeError(
            f"bin_size of {name!r}: expected an int or None, got {type(bin_size).__name__}"
        )
    if not 1 <= bin_size <= _C.max_bin_size:
        raise ValueError(
            f"bin_size of {name!r}: expected 1 to {_C.max_bin_size}, or None for raw, "
            f"got {bin_size}"
        )
    return bin_size
