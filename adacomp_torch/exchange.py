"""One bucket's exchange: layout table, buffers, headers of earlier exchanges, counts.

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

from . import _C, dense, ops
from .agreement import agree, all_gather_single
from .capacity import Capacity, first_entry_bytes, largest_that_pays
from .layout import BucketParameter, chunk_count

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
    """The options of an exchange that all ranks must share."""

    scale: ops.Scale
    threshold_factor: float
    dense_fallback: float | None


class _Report:
    """What an exchange tells the host: the ranks' largest needed_bytes, and the decoder's status.

    From a GPU they come by a copy that nobody waits for, as a rule: they are read `_DISTANCE`
    exchanges later.
    """

    def __init__(self, values: Tensor, bucket_name: str) -> None:
        self._bucket_name = bucket_name
        self._arrived: torch.cuda.Event | None = None
        if values.device.type == "cpu":
            self._values = values.clone()
            return
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._values.copy_(values, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def needed_bytes(self) -> int:
        """Raises RuntimeError if a payload was malformed: on the CPU the callback has done so."""
        if self._arrived is not None:
            self._arrived.synchronize()
        needed, status = self._values.tolist()
        if status != 0:
            raise RuntimeError(f"adacomp_hook: {self._bucket_name}: {_C.describe_status(status)}")
        return int(needed)


def _any_non_finite(tensor: Tensor) -> Tensor:
    """[1], bool, on the tensor's device; one pass and no copy."""
    if tensor.numel() == 0:
        return torch.zeros(1, dtype=torch.bool, device=tensor.device)
    largest: Tensor = torch.linalg.vector_norm(tensor, float("inf"))
    return ~largest.isfinite().reshape(1)


def _raise_if_failed(exchanged: torch.futures.Future[object], what: str) -> None:
    try:
        exchanged.value()  # raises if a peer is gone; what it returns differs by backend
    except RuntimeError as error:
        raise RuntimeError(f"adacomp_hook: {what} failed: {error}") from None


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
        self.dense_exchanges = 0  # before `start_iter`
        self.bytes_sent = 0
        self.compress_seconds = 0.0
        self.exchange_seconds = 0.0
        self.decompress_seconds = 0.0
        self.exchanges = 0  # compressed ones
        self.fallbacks = 0  # those that were dense because compressing did not pay
        self.capacity = self._make_capacity(buffer)
        self._unread: deque[int] = deque()  # of which exchanges the reports are still to be read
        self._reports: deque[_Report] = deque()  # theirs, as far as they have come
        self._last_report = torch.zeros(2, dtype=torch.int64, device=buffer.device)
        self._payload: Tensor | None = None
        self._gathered: Tensor | None = None
        self._sent: tuple[Tensor, int] | None = None  # the last payload and its step
        self._shares: Tensor | None = None  # or what the last exchange sent if it was dense
        self.watches = False  # whether to find out `non_finite`, which takes a pass over the bucket
        self.non_finite: Tensor | None = None  # [1], bool: of what was decoded last

    def _make_table(self) -> Tensor:
        offset = 0
        rows = []
        for p in self.parameters:
            rows.append((offset, p.numel, p.bin_size or 0, p.residual_offset))
            offset += p.numel
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4)

    def _make_capacity(self, buffer: Tensor) -> Capacity:
        fallback = self.codec.dense_fallback
        if self.dense_bytes == 0:
            fallback = None  # a header, rather than a collective of no bytes
        return Capacity(
            fixed=self.fixed,
            most=min(self.worst_case, int(_C.max_payload_bytes)),
            first_entry_bytes=first_entry_bytes(self.fixed, buffer.numel(), self.world_size),
            pays_up_to=None
            if fallback is None
            else largest_that_pays(self.dense_bytes, self.world_size, fallback),
        )

    def release_buffers(self) -> None:
        self._payload = self._gathered = self._sent = self._shares = self.non_finite = None

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
        if self._shares is not None:
            dense.put_back(self._shares, residual, self.parameters, self.world_size, condition)
        self._sent = self._shares = self.non_finite = None

    def add_to(
        self,
        totals: dict[str, int],
        seconds: dict[str, float],
        counts: dict[str, list[int]],
    ) -> None:
        """Adds this exchange's counts to those of `AdaCompState.stats`."""
        compressed = self.exchanges
        uncompressed = self.fallbacks + self.dense_exchanges
        totals["bytes_sent"] += self.bytes_sent + uncompressed * self.dense_bytes
        totals["dense_bytes"] += (compressed + uncompressed) * self.dense_bytes
        totals["exchanges"] += compressed + self.fallbacks
        totals["fallbacks"] += self.fallbacks
        totals["fallback_bytes"] += self.fallbacks * self.dense_bytes
        for key in seconds:
            seconds[key] += getattr(self, key)
        for p, (entries, dropped) in zip(self.parameters, self.counters.tolist(), strict=True):
            bins = -(-p.numel // p.bin_size) if p.bin_size else 0
            chunks = chunk_count(p.numel, p.bin_size)
            for i, count in enumerate((entries, dropped, bins * compressed, chunks * compressed)):
                counts[p.name][i] += count

    # ---- headers ---------------------------------------------------------------------------------

    def _read_reports(self) -> None:
        """Takes the headers of exchanges up to the one before the last into account, and not of the
        last: they may be here already, but not on every rank."""
        coming = self.exchanges + self.fallbacks
        while self._unread and self._unread[0] <= coming - _DISTANCE:
            if not self._reports:
                raise RuntimeError(
                    f"adacomp_hook: an earlier exchange of the bucket from "
                    f"{self.parameters[0].name!r} failed; restart from a checkpoint"
                )
            self.capacity.add(self._reports.popleft().needed_bytes())
            self._unread.popleft()

    def check(self) -> None:
        """Raises RuntimeError for a malformed payload that a device has found since."""
        for report in self._reports:
            report.needed_bytes()

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
        """Begins the exchange of `buffer`; returns the future of `buffer` with the ranks' mean."""
        self._read_reports()
        capacity = self.capacity.begin()
        if capacity is None:
            return self._start_dense(buffer, residual, bucket_name)
        return self._start_compressed(buffer, residual, step, capacity, bucket_name)

    def _start_dense(
        self, buffer: Tensor, residual: Tensor, bucket_name: str
    ) -> torch.futures.Future[Tensor]:
        began = time.perf_counter()
        self.release_buffers()  # larger than the bucket, and not used for some time
        dense.take_shares(buffer, residual, self.parameters, self.world_size)
        self._shares = buffer.clone()
        sent = time.perf_counter()
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        assert work is not None
        self.fallbacks += 1
        self.compress_seconds += sent - began

        def finish(exchanged: torch.futures.Future[object]) -> Tensor:
            _raise_if_failed(exchanged, f"{bucket_name}: the all-reduce")
            if self.watches:
                self.non_finite = _any_non_finite(buffer)
            self.exchange_seconds += time.perf_counter() - sent
            return buffer

        _callbacks.add(finish)
        return work.get_future().then(finish)

    def _start_compressed(
        self, buffer: Tensor, residual: Tensor, step: int, capacity: int, bucket_name: str
    ) -> torch.futures.Future[Tensor]:
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
        self._sent, self._shares = (payload, step), None
        sent = time.perf_counter()
        work = all_gather_single(gathered, payload, group=self.group, async_op=True)
        assert work is not None
        self._unread.append(self.exchanges + self.fallbacks)
        self.exchanges += 1
        self.bytes_sent += capacity
        self.compress_seconds += sent - began

        def decode(exchanged: torch.futures.Future[object]) -> Tensor:
            # No collective and no wait in here: Gloo runs callbacks on two threads only.
            received = time.perf_counter()
            _raise_if_failed(exchanged, f"{bucket_name}: the all-gather")
            payloads = gathered.view(self.world_size, capacity)
            try:
                ops.decompress(
                    payloads,
                    buffer,
                    self.table,
                    step=step,
                    scale=scale,
                    threshold_factor=factor,
                    status=self._last_report[1:],
                )
            except RuntimeError as error:
                raise RuntimeError(f"adacomp_hook: {bucket_name}: {error}") from None
            if self.watches:
                self.non_finite = _any_non_finite(buffer)
            needed = payloads[:, _NEEDED_AT].view(torch.int64)
            torch.amax(needed, dim=(0,), out=self._last_report[:1])
            self._reports.append(_Report(self._last_report, bucket_name))
            self.exchange_seconds += received - sent
            self.decompress_seconds += time.perf_counter() - received
            return buffer

        _callbacks.add(decode)
        return work.get_future().then(decode)
