"""The communication hooks that are compared, by name. DDP inspects their annotations, so they must
be real objects here: no `from __future__ import annotations` in this file.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from adacomp_torch import AdaCompState, adacomp_hook, default_bin_size
from adacomp_torch.layout import BinSizeOption

# The name since torch 2.13, where the older one began to warn.
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

TOP_K_SHARE = 0.01
CODEC_SECONDS = ("compress_seconds", "exchange_seconds", "decompress_seconds")


# ---- noop ----------------------------------------------------------------------------------------


def noop_hook(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Exchanges nothing: what remains is the floor, compute and DDP's own work."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# ---- top-k ---------------------------------------------------------------------------------------


@dataclass
class TopKState:
    """What every rank keeps for `topk_hook`: the residuals, by parameter, and host times."""

    share: float = TOP_K_SHARE
    process_group: Any = None
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CODEC_SECONDS, 0.0))
    _of_bucket: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _of_parameter: dict[int, Tensor] = field(default_factory=dict)

    def residual(self, parameters: Sequence[Tensor], like: Tensor) -> Tensor:
        """[bucket.numel()], float32: the residuals of a bucket's parameters in their order.

        By parameter, because DDP regroups its buckets after the first step.
        """
        key = tuple(map(id, parameters))
        if key not in self._of_bucket:
            zeros = (like.new_zeros(p.numel(), dtype=torch.float32) for p in parameters)
            parts = [
                self._of_parameter.get(id(p), zero)
                for p, zero in zip(parameters, zeros, strict=True)
            ]
            flat = torch.cat(parts)
            # A bucket that held any of these parameters before is gone for good.
            for old in [old for old in self._of_bucket if set(old) & set(key)]:
                del self._of_bucket[old]
            self._of_bucket[key] = flat
            views = flat.split([p.numel() for p in parameters])
            self._of_parameter.update(zip(key, views, strict=True))
        return self._of_bucket[key]

    def of_parameter(self, parameter: Tensor) -> Tensor:
        """[parameter.numel()], float32: a live view."""
        return self._of_parameter[id(parameter)]


def topk_hook(
    state: TopKState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The usual baseline: the bucket's largest 1 % in magnitude as int32 indices and float32
    values, all-gathered in one collective; the rest stays in the residual. float32 buckets only.
    """
    began = time.perf_counter()
    buffer: Tensor = bucket.buffer()
    if buffer.dtype != torch.float32:
        raise TypeError(f"topk_hook: expected a float32 bucket, got {buffer.dtype}")
    group = state.process_group or dist.group.WORLD
    world_size = dist.get_world_size(group)
    residual = state.residual(bucket.parameters(), buffer)
    residual.add_(buffer)
    count = math.ceil(state.share * buffer.numel())
    indices = residual.abs().topk(count, sorted=False).indices
    payload = torch.empty(2, count, dtype=torch.int32)
    payload[0] = indices
    payload[1] = residual[indices].view(torch.int32)
    residual[indices] = 0.0
    gathered = torch.empty(world_size, 2, count, dtype=torch.int32)
    sent = time.perf_counter()
    work = all_gather_single(gathered.view(-1), payload.view(-1), group=group, async_op=True)
    state.seconds["compress_seconds"] += sent - began

    def decode(exchanged: torch.futures.Future[object]) -> Tensor:
        received = time.perf_counter()
        exchanged.value()  # raises if a peer is gone
        buffer.zero_()
        for rank in range(world_size):
            buffer.index_add_(0, gathered[rank, 0], gathered[rank, 1].view(torch.float32))
        buffer.div_(world_size)
        state.seconds["exchange_seconds"] += received - sent
        state.seconds["decompress_seconds"] += time.perf_counter() - received
        return buffer

    assert work is not None
    return work.get_future().then(decode)


# ---- the hooks by name ---------------------------------------------------------------------------

Seconds = Callable[[], dict[str, float]]


def _no_seconds() -> dict[str, float]:
    return {}


@dataclass(frozen=True)
class Hook:
    """`register(ddp)` returns the function that tells host seconds so far, by CODEC_SECONDS."""

    description: str
    register: Callable[[DistributedDataParallel], Seconds]
    warm_up: int = 5
    one_bucket: bool = False

    def wrap(self, model: nn.Module) -> tuple[DistributedDataParallel, Seconds]:
        # Batch norm's averages stay each rank's own: with noop nothing at all is to be sent.
        if self.one_bucket:
            megabytes = sum(p.numel() * p.element_size() for p in model.parameters()) // 2**20 + 1
            ddp = DistributedDataParallel(model, broadcast_buffers=False, bucket_cap_mb=megabytes)
        else:
            ddp = DistributedDataParallel(model, broadcast_buffers=False)
        return ddp, self.register(ddp)


def _plain(ddp: DistributedDataParallel) -> Seconds:
    return _no_seconds  # DDP's own all-reduce, without any hook


def _simple(hook: Callable[..., Any]) -> Callable[[DistributedDataParallel], Seconds]:
    def register(ddp: DistributedDataParallel) -> Seconds:
        ddp.register_comm_hook(None, hook)
        return _no_seconds

    return register


def _power_sgd(rank: int) -> Callable[[DistributedDataParallel], Seconds]:
    def register(ddp: DistributedDataParallel) -> Seconds:
        # 2 is the earliest start that it allows with its error feedback and warm start.
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return _no_seconds

    return register


def _top_k(ddp: DistributedDataParallel) -> Seconds:
    state = TopKState()
    ddp.register_comm_hook(state, topk_hook)
    return lambda: dict(state.seconds)


def adacomp(
    scale: Any, bin_size: BinSizeOption = default_bin_size
) -> Callable[[DistributedDataParallel], Seconds]:
    def register(ddp: DistributedDataParallel) -> Seconds:
        state = AdaCompState(ddp, scale=scale, bin_size=bin_size)
        ddp.register_comm_hook(state, adacomp_hook)

        def seconds() -> dict[str, float]:
            stats = state.stats()
            return {name: stats[name] for name in CODEC_SECONDS}

        return seconds

    return register


# PowerSGD waits inside a callback, and Gloo has two threads for callbacks: it hangs on two buckets.
# AdaComp's payloads shrink while the residuals fill up, for about a hundred steps.
HOOKS = {
    "noop": Hook("nothing sent", _simple(noop_hook)),
    "allreduce": Hook("plain DDP", _plain),
    "fp16": Hook("fp16 hook", _simple(default_hooks.fp16_compress_hook)),
    "bf16": Hook("bf16 hook", _simple(default_hooks.bf16_compress_hook)),
    "powersgd1": Hook("PowerSGD, rank 1", _power_sgd(1), warm_up=8, one_bucket=True),
    "powersgd4": Hook("PowerSGD, rank 4", _power_sgd(4), warm_up=8, one_bucket=True),
    "topk": Hook("top-k, 1 %", _top_k, warm_up=8),
    "layer": Hook("AdaComp, layer scale", adacomp("layer"), warm_up=100),
    "bin": Hook("AdaComp, bin scale", adacomp("bin"), warm_up=100),
}
