"""What a saved `AdaCompState` must look like, and how the ranks' states become one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

FORMAT = 1
_KEYS = {"format", "rank", "world_size", "step", "loss_scale", "residuals"}


def mismatch(
    saved: Mapping[str, Any], residuals: Mapping[str, Tensor], rank: int, world_size: int
) -> str | None:
    """One sentence on why `saved` cannot be loaded on `rank` with these `residuals`, or None.

    A state made by `merge` has None for its rank and world size and fits any.
    """
    if not isinstance(saved, Mapping):
        return f"state_dict: expected a mapping, got {type(saved).__name__}"
    expected: dict[str, int | None] = {"format": FORMAT, "world_size": world_size, "rank": rank}
    if saved.get("rank", 0) is None:
        expected = {"format": FORMAT, "world_size": None}
    for key, value in expected.items():
        if saved.get(key, "nothing") != value:
            hint = "; merge_state_dicts makes one state of all ranks'" if key != "format" else ""
            return f"state_dict: expected {key} {value}, got {saved.get(key, 'nothing')}{hint}"
    step = saved.get("step")
    if not isinstance(step, int) or step < 0:
        return f"state_dict: expected step as an int >= 0, got {step!r}"
    scale = saved.get("loss_scale")
    if not isinstance(scale, float) or not 0 < scale < float("inf"):
        return f"state_dict: expected loss_scale as a finite float > 0, got {scale!r}"
    return _residual_mismatch(saved.get("residuals"), residuals)


def _residual_mismatch(saved: object, residuals: Mapping[str, Tensor]) -> str | None:
    if not isinstance(saved, Mapping):
        return f"state_dict: expected residuals as a mapping, got {type(saved).__name__}"
    for name in dict.fromkeys((*residuals, *saved)):
        if name not in saved or name not in residuals:
            place = "the model" if name in saved else "the state_dict"
            return f"state_dict: expected a residual of {name!r} in both, got none in {place}"
        value, shape = saved[name], tuple(residuals[name].shape)
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            return f"state_dict: expected residual {name!r} in float32, got {kind}"
        if tuple(value.shape) != shape:
            return f"state_dict: expected residual {name!r} of {shape}, got {tuple(value.shape)}"
        if not bool(torch.isfinite(value).all()):
            return f"state_dict: expected finite values in residual {name!r}, got inf or NaN"
    return None


def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """See `AdaCompState.merge_state_dicts`."""
    for saved in states:
        if not isinstance(saved, Mapping) or _KEYS - saved.keys():
            raise ValueError(
                f"state_dicts: expected mappings with {', '.join(sorted(_KEYS))}, "
                "as state_dict() makes them"
            )
    ranks = [saved["rank"] for saved in states]
    sizes = [saved["world_size"] for saved in states]
    if not ranks or set(sizes) != {len(ranks)} or set(ranks) != set(range(len(ranks))):
        raise ValueError(
            f"state_dicts: expected one state of each rank, got ranks {ranks} of world sizes "
            f"{sizes}"
        )
    first = states[0]
    for rank, saved in zip(ranks, states, strict=True):
        if saved["step"] != first["step"]:
            raise ValueError(
                f"state_dicts: expected step {first['step']} on every rank, "
                f"got {saved['step']} on rank {rank}"
            )
        if saved["loss_scale"] != first["loss_scale"]:
            raise ValueError(
                f"state_dicts: expected loss_scale {first['loss_scale']} on every rank, "
                f"got {saved['loss_scale']} on rank {rank}"
            )
        problem = _residual_mismatch(saved["residuals"], first["residuals"])
        if problem:
            raise ValueError(f"{problem} (rank {rank} against rank {ranks[0]})")
    return {
        "format": FORMAT,
        "rank": None,
        "world_size": None,
        "step": first["step"],
        "loss_scale": first["loss_scale"],
        "residuals": {
            name: torch.stack([saved["residuals"][name].double() for saved in states])
            .mean(0)
            .float()
            for name in first["residuals"]
        },
    }
