"""Finding out that ranks are configured differently, before a collective turns it into a hang."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

# The name since torch 2.13, where the older one began to warn.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

_SLOTS = 16  # fixed, so that other versions of this package can be told apart too


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little", signed=True)


def _difference(values: list[Any]) -> str:
    """Says which rank has which value, and for mappings under which key they first differ."""
    if all(isinstance(value, Mapping) for value in values):
        keys = list(dict.fromkeys(key for value in values for key in value))
        for key in keys:
            inner = [value.get(key, "nothing") for value in values]
            if any(item != inner[0] for item in inner):
                return f" of {key!r}: {_by_rank(inner)}"
        return ": the order differs"
    return f": {_by_rank(values)}"


def _by_rank(values: list[Any]) -> str:
    return ", ".join(f"rank {rank} has {value!r}" for rank, value in enumerate(values))


def agree(fields: Mapping[str, object], group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises the same RuntimeError on every rank of `group` unless all passed equal `fields`.

    Collective and blocking: one all-gather of 128 bytes on `device`, and one of the fields
    themselves if they differ. A field's value is a plain type with a faithful repr, or a mapping
    from parameter name to such.
    """
    digests = [_digest(item) for item in fields.items()]
    record = torch.zeros(_SLOTS, dtype=torch.int64)
    record[: len(digests)] = torch.tensor(digests)
    record = record.to(device)
    world_size = dist.get_world_size(group)
    records = torch.empty(world_size * _SLOTS, dtype=torch.int64, device=device)
    all_gather_single(records, record, group=group)
    if bool((records.view(world_size, _SLOTS) == record).all(dim=1).all()):
        return
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, dict(fields), group=group)
    for name in fields:
        values = [other.get(name, "nothing") for other in gathered]
        if any(_digest(value) != _digest(values[0]) for value in values):
            raise RuntimeError(f"adacomp_torch: ranks differ in {name}{_difference(values)}")
    raise RuntimeError(f"adacomp_torch: ranks differ in their records: {_by_rank(gathered)}")
