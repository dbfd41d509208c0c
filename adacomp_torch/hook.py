"""The communication hook. DDP inspects its annotations, so they must be real objects here: no
`from __future__ import annotations` in this file.
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from .state import AdaCompState


def adacomp_hook(
    state: AdaCompState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """DDP hook: all-gathers AdaComp payloads and decodes their mean into the bucket.

    Register it with `ddp.register_comm_hook(AdaCompState(ddp), adacomp_hook)`. Per bucket and step
    there is one all-gather of uint8; before `start_iter` torch's `allreduce_hook` runs instead.

    Raises RuntimeError or TypeError, before any collective, for a bucket that is sparse, of an
    unsupported dtype, or holds parameters that are not those of the state's DDP module.
    """
    exchange = state._begin(bucket)
    if state._step < state.start_iter:
        exchange.dense_exchanges += 1
        return allreduce_hook(exchange.group, bucket)
    return exchange.start(
        bucket.buffer(),
        state._residuals.flat[bucket.buffer().device],
        state._step,
        f"bucket {bucket.index()} (from {exchange.parameters[0].name!r})",
    )
