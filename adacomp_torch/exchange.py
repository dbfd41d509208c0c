"""One bucket's exchange: layout table, capacity from step to step, buffers, counts.

An exchange is known by the parameters of its bucket, never by the bucket's index or offset, which
DDP changes when it rebuilds its buckets.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from . import _C, ops
from .agreement import agree, all_gather_single

_ALIGNMENT = 16
_FIRST_ENTRY_BYTES = 64 * 1024
_FIRST_RECEIVE_BYTES = 1024 * 1024
_WINDOW = 16  # exchanges that size the capacity, so that a rarely active parameter still counts
_DISTANCE = 2  # exchange n is sized by the headers of n - 2 and before, on every backend alike
_NEEDED_AT = slice(16, 24)  # header field needed_bytes, int64

# Callbacks that a backend's thread still holds. It drops them after the backward has gone on, under
# the GIL, and a thread that asks for the GIL while the interpreter shuts down aborts the process: a
# script that ends with its last step would now and then die with SIGABRT after its work is done.
_callbacks: weakref.WeakSet[Callable[..., Tensor]] = weakref.WeakSet()
_EXIT_SECONDS = 5.0


@atexit.register
def _wait_for_callbacks() -> None:
    deadline = time.monotonic() + _EXIT_SECONDS
    while len(_callbacks) > 0 and time.monotonic() < deadline:
        time.sleep(0.001)  # lends the GIL to those threads


@dataclass(frozen=True)
class Codec:
    """The options that both ends of the wire must share."""

    scale: ops.Scale
    threshold_factor: float


@dataclass(frozen=True)
class BucketParameter:
    """A parameter's place; `residual_offset` is within its device's residual, -1 if sent raw."""

    name: str
    numel: int
    bin_size: int | None
    residual_offset: int


def _align_down(count: int) -> int:
    return count // _ALIGNMENT * _ALIGNMENT


def _align_up(count: int) -> int:
    return _align_down(count + _ALIGNMENT - 1)


def _any_non_finite(tensor: Tensor) -> Tensor:
    """[1], bool, on the tensor's device; one pass and no copy."""
    if tensor.numel() == 0:
        return torch.zeros(1, dtype=torch.bool, device=tensor.device)
    largest: Tensor = torch.linalg.vector_norm(tensor, float("inf"))
    return ~largest.isfinite().reshape(1)


class BucketExchange:
    """Exchanges of the buckets that hold exactly `parameters`, in this order."""

    def __init__(
        self,
        parameters: Sequence[BucketParameter],
        buffer: Tensor,
        codec: Codec,
        group: dist.ProcessGroup,
    ) -> None:
        self.parameters = tuple(parameters)
        self.codec = codec
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.dtype = buffer.dtype
        self.device = buffer.device
        self.table = self._make_table()
        self.fixed, self.worst_case = ops.payload_capacity(self.table, scale=codec.scale)
        self.layout_hash = _C.layout_hash(
            self.table, buffer, codec.scale == "bin", codec.threshold_factor
        )
        self.dense_bytes = buffer.numel() * buffer.element_size()
        self.counters = torch.zeros(
            (len(self.parameters), 2), dtype=torch.int64, device=buffer.device
        )
        self.last_step = -1
        self.dense_exchanges = 0
        self.bytes_sent = 0
        self.compress_seconds = 0.0
        self.exchange_seconds = 0.0
        self.decompress_seconds = 0.0
        self.exchanges = 0
        self._completed = 0
        self._needed: deque[int] = deque(maxlen=_WINDOW + _DISTANCE)  # entry bytes, all ranks' most
        self._payload: Tensor | None = None
        self._gathered: Tensor | None = None
        self._sent: tuple[Tensor, int] | None = None  # the last payload and its step
        self.watches = False  # whether to find out `non_finite`, which takes a pass over the bucket
        self.non_finite: Tensor | None = None  # [1], bool: of what was decoded last

    def _make_table(self) -> Tensor:
        offset = 0
        rows = []
        for p in self.parameters:
            rows.append((offset, p.numel, p.bin_size or 0, p.residual_offset))
            offset += p.numel
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)

    def release_buffers(self) -> None:
        self._payload = self._gathered = self._sent = self.non_finite = None

    def restore(self, residual: Tensor, condition: Tensor) -> None:
        """Puts back into `residual` what was sent last if `condition`, [1] bool; only once."""
        if self._sent is not None:
            payload, step = self._sent
            ops.restore(
                payload,
                residual,
                self.table,
                condition,
                dtype=self.dtype,
                step=step,
                scale=self.codec.scale,
                threshold_factor=self.codec.threshold_factor,
            )
        self._sent = self.non_finite = None

    def add_to(
        self,
        totals: dict[str, int],
        seconds: dict[str, float],
        counts: dict[str, list[int]],
    ) -> None:
        """Adds this exchange's counts to those of `AdaCompState.stats`."""
        compressed = self.exchanges
        totals["bytes_sent"] += self.bytes_sent + self.dense_exchanges * self.dense_bytes
        totals["dense_bytes"] += (compressed + self.dense_exchanges) * self.dense_bytes
        for key in seconds:
            seconds[key] += getattr(self, key)
        for p, (entries, dropped) in zip(self.parameters, self.counters.tolist(), strict=True):
            bins = -(-p.numel // p.bin_size) if p.bin_size else 0
            for i, count in enumerate((entries, dropped, bins * compressed)):
                counts[p.name][i] += count

    # ---- capacity --------------------------------------------------------------------------------

    def _first_entry_bytes(self) -> int:
        """The first exchanges' room: little enough that W payloads do not double the memory."""
        numel = sum(p.numel for p in self.parameters)
        wanted = max(_FIRST_ENTRY_BYTES, numel * 4 // 8)
        bound = max(4 * numel, _FIRST_RECEIVE_BYTES) // self.world_size - self.fixed
        return max(0, _align_down(min(wanted, bound)))

    def capacity(self) -> int:
        """Payload bytes of the coming exchange, the same on every rank without asking."""
        if self.exchanges < _DISTANCE:
            entry_bytes = self._first_entry_bytes()
        else:
            sizing = self.exchanges - _DISTANCE + 1  # exchanges whose headers may count
            if self._completed < sizing:
                raise RuntimeError(
                    f"adacomp_hook: an earlier exchange of the bucket from "
                    f"{self.parameters[0].name!r} failed; restart from a checkpoint"
                )
            # Headers of a later exchange than n - 2 may be here already: not on every rank.
            surplus = self._completed - sizing
            known = list(self._needed)[: len(self._needed) - surplus][-_WINDOW:]
            # No margin on top: the largest of 16 W needs is one, what exceeds it is only late, and
            # an element waits for about bin_size / 6 steps anyway.
            entry_bytes = max(known)
        return min(self.fixed + _align_up(entry_bytes), self.worst_case, int(_C.max_payload_bytes))

    def _buffers(self, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Send and receive buffers, kept while they are neither too small nor twice too large."""
        if self._payload is None or not capacity <= self._payload.numel() <= 2 * capacity:
            self._payload = torch.empty(capacity, dtype=torch.uint8, device=device)
            self._gathered = torch.empty(
                capacity * self.world_size, dtype=torch.uint8, device=device
            )
        assert self._gathered is not None
        return self._payload[:capacity], self._gathered[: capacity * self.world_size]

    # ---- the exchange ----------------------------------------------------------------------------

    def agree(self, fields: dict[str, object], device: torch.device) -> None:
        """Compares configuration, layout and step on all ranks; see `agreement.agree`."""
        bin_sizes = {p.name: p.bin_size for p in self.parameters}
        agree(
            {**fields, "bin_size": bin_sizes, "layout hash": hex(self.layout_hash)},
            self.group,
            device,
        )

    def start(
        self, buffer: Tensor, residual: Tensor, step: int, bucket_name: str
    ) -> torch.futures.Future[Tensor]:
        """Compresses `buffer`, begins the all-gather, returns the future of `buffer` decoded."""
        capacity = self.capacity()
        payload, gathered = self._buffers(capacity, buffer.device)
        scale, factor = self.codec.scale, self.codec.threshold_factor
        began = time.perf_counter()
        ops.compress(
            buffer,
            residual,
            self.table,
            payload,
            step=step,
            scale=scale,
            threshold_factor=factor,
            counters=self.counters,
        )
        self._sent = (payload, step)
        sent = time.perf_counter()
        work = all_gather_single(gathered, payload, group=self.group, async_op=True)
        assert work is not None
        self.exchanges += 1
        self.bytes_sent += capacity
        self.compress_seconds += sent - began

        def decode(exchanged: torch.futures.Future[object]) -> Tensor:
            # No collective and no wait in here: Gloo runs callbacks on two threads only.
            received = time.perf_counter()
            try:
                exchanged.value()  # raises if a peer is gone; what it returns differs by backend
            except RuntimeError as error:
                raise RuntimeError(
                    f"adacomp_hook: {bucket_name}: the all-gather failed: {error}"
                ) from None
            payloads = gathered.view(self.world_size, capacity)
            try:
                ops.decompress(
                    payloads, buffer, self.table, step=step, scale=scale, threshold_factor=factor
                )
            except RuntimeError as error:
                raise RuntimeError(f"adacomp_hook: {bucket_name}: {error}") from None
            if self.watches:
                self.non_finite = _any_non_finite(buffer)
            needed = payloads[:, _NEEDED_AT].view(torch.int64).max()
            self._needed.append(int(needed) - self.fixed)
            self._completed += 1
            self.exchange_seconds += received - sent
            self.decompress_seconds += time.perf_counter() - received
            return buffer

        _callbacks.add(decode)
        return work.get_future().then(decode)
