"""Checks of the options of `AdaCompState`: name, what was expected, what came."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel


def check_hook_is_free(ddp: DistributedDataParallel) -> None:
    """DDP takes one hook; some of its features are one, and would say so less clearly and later."""
    taken = [getattr(hook, "__qualname__", repr(hook)) for hook, _ in ddp._comm_hooks]
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp._module_parameters):
        taken = ["the one of an optimizer in the backward"]
    if taken:
        raise ValueError(
            f"module: expected no communication hook yet, because DDP takes only one, "
            f"got {', '.join(taken)}"
        )


def checked_factor(factor: object) -> float:
    if not isinstance(factor, (int, float)) or isinstance(factor, bool):
        raise TypeError(f"threshold_factor: expected a number, got {type(factor).__name__}")
    if not 1.0 <= factor <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"threshold_factor: expected a finite number >= 1 within float32, got {factor}"
        )
    return float(factor)


def checked_fallback(ratio: object) -> float | None:
    if ratio is None:
        return None
    if not isinstance(ratio, (int, float)) or isinstance(ratio, bool):
        raise TypeError(f"dense_fallback: expected a number or None, got {type(ratio).__name__}")
    if not 0.0 < ratio < float("inf"):
        raise ValueError(f"dense_fallback: expected a finite number > 0, or None, got {ratio}")
    return float(ratio)


def check_start_iter(start_iter: object) -> None:
    if not isinstance(start_iter, int) or isinstance(start_iter, bool) or start_iter < 0:
        raise ValueError(f"start_iter: expected an int >= 0, got {start_iter!r}")


def check_grad_scaler(scaler: object) -> None:
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(
            f"grad_scaler: expected a torch.amp.GradScaler, got {type(scaler).__name__}"
        )


def check_process_group(group: object) -> None:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "process_group: expected a ProcessGroup that this rank is in, "
            f"got {type(group).__name__}"
        )
