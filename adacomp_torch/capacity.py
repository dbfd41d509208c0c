"""How large a bucket's payloads are, and whether they pay: the same on every rank without asking.

Everything here follows from the layout and from headers that all ranks have, so that no rank has to
tell another what it will send.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

ALIGNMENT = 16  # bytes; a payload is a multiple of it

_FIRST_ENTRY_BYTES = 64 * 1024
_FIRST_RECEIVE_BYTES = 1024 * 1024
_WINDOW = 32  # exchanges that size the capacity, so that a rarely active parameter still counts
_FEW = 4  # exchanges that count even at the beginning, when otherwise only the later half does
_DEVIATIONS = (5, 2)  # 5/2 standard deviations above the mean, in integers
_DENSE_EXCHANGES = 64  # before compressing is tried again
_TRIALS = 2  # headers in a row that have to say that compressing does not pay


def _align_down(count: int) -> int:
    return count // ALIGNMENT * ALIGNMENT


def _align_up(count: int) -> int:
    return _align_down(count + ALIGNMENT - 1)


def first_entry_bytes(fixed: int, numel: int, world_size: int) -> int:
    """The first exchanges' room: little enough that W payloads do not double the memory."""
    wanted = max(_FIRST_ENTRY_BYTES, numel * 4 // 8)
    bound = max(4 * numel, _FIRST_RECEIVE_BYTES) // world_size - fixed
    return max(0, _align_down(min(wanted, bound)))


def largest_that_pays(dense_bytes: int, world_size: int, dense_fallback: float) -> int:
    """Largest payload with which W of them are fewer bytes than `dense_fallback` x the gradients.

    With 2.0 that is where an all-gather and a ring all-reduce carry the same: (W - 1) payloads
    against 2 (W - 1) / W times the gradients.
    """
    return _align_down(max(0, int(dense_fallback * dense_bytes / world_size) - 1))


def mean_and_deviations(needed: Sequence[int]) -> int:
    """Entry bytes for the coming exchange: mean + 5/2 standard deviations of the needs.

    Integers throughout, so that other machines and versions of Python get the same. Measured
    against other rules in docs/capacity.md.
    """
    count, total = len(needed), sum(needed)
    spread = math.isqrt(count * sum(n * n for n in needed) - total * total)  # count x deviation
    times, of = _DEVIATIONS
    return (of * total + times * spread) // (of * count)


class Capacity:
    """Size of one layout's payloads from exchange to exchange, in bytes.

    `begin` is called before every exchange, and `add` before that with each header that counts.

    Args:
        fixed: bytes of a payload without its entries.
        most: bytes that a payload never exceeds.
        first_entry_bytes: room for entries as long as no header is known.
        pays_up_to: payload bytes that still pay; None: all do. See `largest_that_pays`.
    """

    def __init__(
        self, *, fixed: int, most: int, first_entry_bytes: int, pays_up_to: int | None
    ) -> None:
        self._fixed = fixed
        self._most = most
        self._first_entry_bytes = first_entry_bytes
        self._pays_up_to = pays_up_to
        self._dense_left = 0
        self._needed: deque[int] = deque(maxlen=_WINDOW)  # entry bytes, the most of all ranks
        self._headers = 0  # that `_needed` has or had

    def add(self, needed: int) -> None:
        """Takes a header into account: the whole payload's needed bytes, the most of all ranks."""
        if self._dense_left == 0:  # else it is from before the dense exchanges, and out of date
            self._needed.append(needed - self._fixed)
            self._headers += 1

    def begin(self) -> int | None:
        """Payload bytes of the coming exchange, or None if it is to be dense."""
        if self._pays_up_to is not None and self._fixed > self._pays_up_to:
            return None  # whatever the gradients
        if self._dense_left > 0:
            self._dense_left -= 1
        elif self._does_not_pay():
            self._dense_left = _DENSE_EXCHANGES - 1
        else:
            return self.payload_bytes()
        self._needed.clear()
        self._headers = 0
        return None

    def payload_bytes(self) -> int:
        """Payload bytes of a compressed exchange now."""
        entry_bytes = self._first_entry_bytes
        if self._needed:
            # The later half of all there were: needs fall as long as residuals fill up.
            count = max(_FEW, self._headers // 2)
            entry_bytes = mean_and_deviations(list(self._needed)[-count:])
        size = min(self._fixed + _align_up(entry_bytes), self._most)
        return size if self._pays_up_to is None else min(size, self._pays_up_to)

    def _does_not_pay(self) -> bool:
        """Whether the last needs were all too large, and are not falling.

        They fall for some steps wherever residuals are still empty: at first 2 to 9 times as much
        is sent as later. Waiting costs little, because no payload is larger than what pays.
        """
        if self._pays_up_to is None or len(self._needed) < _TRIALS:
            return False
        last = list(self._needed)[-_TRIALS:]
        too_large = min(last) > self._pays_up_to - self._fixed
        return too_large and all(b >= a for a, b in itertools.pairwise(last))
