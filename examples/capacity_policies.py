"""Records what payloads need in a training run, and simulates rules for their size on it.

    torchrun --nproc-per-node=2 examples/capacity_policies.py record needs.csv \\
        examples/train_lstm.py --runs layer --steps 1000
    python examples/capacity_policies.py simulate needs.csv

`record` runs a training script unchanged, but with payloads so large that nothing is ever late,
and writes a line for every exchange and rank. `simulate` replays the needs: what is late in one
exchange would be needed in a later one, which it leaves out. `measure`, used like `record`, leaves
the sizes as the package chooses them and prints padding and dropped chunks.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import math
import os
import runpy
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DISTANCE = 2  # an exchange is sized by the headers of the one before the last and earlier ones
SKIP = 50  # exchanges of each layout that do not count
# fixed, capacity and needed are bytes of whole payloads
COLUMNS = (
    "layout",
    "exchange",
    "rank",
    "fixed",
    "chunks",
    "capacity",
    "needed",
    "dropped",
)


# ---- recording -----------------------------------------------------------------------------------


def trace(out: Path, script: str, arguments: list[str], keep_sizes: bool) -> None:
    """Runs `script` under torchrun; rank 0 writes what all ranks' headers say."""
    from adacomp_torch import capacity, exchange, ops

    rows: list[dict[str, Any]] = []
    counts: dict[str, int] = defaultdict(int)

    def decompress(payloads: Any, grad: Any, layout: Any, **options: Any) -> None:
        ops.decompress(payloads, grad, layout, **options)
        headers = [ops.inspect_payload(payload.cpu(), layout) for payload in payloads]
        key = hex(headers[0]["layout_hash"])
        for rank, header in enumerate(headers):
            table = header["chunk_table"]
            empty = sum(a == b for a, b in itertools.pairwise(table))
            values = (
                *(key, counts[key], rank, header["fixed_bytes"], len(table) - 1),
                # Without an entry where the payload was full, as no gradient here is all zero.
                *(payloads.shape[1], header["needed_bytes"]),
                empty if header["needed_bytes"] > payloads.shape[1] else 0,
            )
            rows.append(dict(zip(COLUMNS, values, strict=True)))
        counts[key] += 1

    if not keep_sizes:
        # The worst case, never dense: what is needed then follows from the gradients alone.
        capacity.Capacity.begin = lambda self: self._most  # type: ignore[method-assign]
    exchange.ops = type("ops", (), {**vars(ops), "decompress": staticmethod(decompress)})  # type: ignore
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    if os.environ.get("RANK", "0") == "0":
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        if keep_sizes:
            print_measured(out)


def print_measured(path: Path) -> None:
    with path.open(newline="") as file:
        counted = [row for row in csv.DictReader(file) if int(row["exchange"]) >= SKIP]
    sent = sum(int(row["capacity"]) for row in counted)
    used = sum(min(int(row["capacity"]), int(row["needed"])) for row in counted)
    chunks = sum(int(row["chunks"]) for row in counted)
    dropped = sum(int(row["dropped"]) for row in counted)
    print(
        f"After the first {SKIP} steps: padding {1 - used / max(1, sent):.1%} of the payloads, "
        f"dropped chunks {dropped / max(1, chunks):.3%}"
    )


# ---- policies ------------------------------------------------------------------------------------


Size = Callable[[list[int]], float]  # the needs of a window -> entry bytes


class Policy:
    """Entry bytes of the next exchange from the last headers: the most of all ranks each.

    `later_half`: of less than twice the window, only the later half counts, but four at least.
    """

    def __init__(self, window: int, size: Size, later_half: bool) -> None:
        self._size = size
        self._later_half = later_half
        self._needed: deque[int] = deque(maxlen=window)
        self._headers = 0

    def add(self, needed: int) -> None:
        self._needed.append(needed)
        self._headers += 1

    def entry_bytes(self) -> int:
        count = max(4, self._headers // 2) if self._later_half else self._headers
        return int(self._size(list(self._needed)[-count:]))


def with_margin(margin: float) -> Size:
    return lambda needed: margin * max(needed)


def quantile(share: float, margin: float) -> Size:
    """`margin` times the value that `share` of the window's needs do not exceed."""

    def size(needed: list[int]) -> float:
        ordered = sorted(needed)
        return margin * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return size


def mean_and_deviations(times: float) -> Size:
    def size(needed: list[int]) -> float:
        mean = sum(needed) / len(needed)
        return mean + times * math.sqrt(sum((n - mean) ** 2 for n in needed) / len(needed))

    return size


RULES: list[tuple[str, Size, bool, tuple[int, ...]]] = [  # name, size, later half, windows
    *((f"largest x {m:g}", with_margin(m), False, (8, 16, 32)) for m in (1.0, 1.06, 1.125, 1.25)),
    *(
        (f"{share:.0%} quantile x {m:g}", quantile(share, m), False, (16, 32))
        for share, m in ((0.5, 1.25), (0.75, 1.25), (0.9, 1.06), (0.9, 1.125))
    ),
    *(
        (f"mean + {times:g} deviations", mean_and_deviations(times), False, (16, 32))
        for times in (2.0, 2.5, 3.0)
    ),
    *(
        (f"mean + {times:g} deviations, later half", mean_and_deviations(times), True, (16, 24, 32))
        for times in (2.0, 2.25, 2.5, 3.0)
    ),
]


# ---- simulation ----------------------------------------------------------------------------------


@dataclass
class Layout:
    """One layout's recorded exchanges."""

    fixed: int = 0
    chunks: int = 0
    needed: list[dict[int, int]] = field(default_factory=list)  # by exchange: rank -> entry bytes


@dataclass
class Result:
    payload: int = 0
    padding: int = 0
    chunks: int = 0
    dropped: int = 0
    sent_in_all: int = 0  # with the first exchanges

    def cell(self) -> str:
        padding, dropped = self.padding / self.payload, self.dropped / max(1, self.chunks)
        return f"{100 * padding:.1f} % / {100 * dropped:.2f} % / {self.sent_in_all / 1e6:.1f} MB"


def read(path: Path) -> list[Layout]:
    layouts: dict[str, Layout] = defaultdict(Layout)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            layout = layouts[row["layout"]]
            layout.fixed, layout.chunks = int(row["fixed"]), int(row["chunks"])
            if int(row["exchange"]) == len(layout.needed):
                layout.needed.append({})
            entry_bytes = int(row["needed"]) - layout.fixed
            layout.needed[int(row["exchange"])][int(row["rank"])] = entry_bytes
    return list(layouts.values())


def sizes(layout: Layout, policy: Policy) -> Iterator[tuple[int, dict[int, int], int]]:
    """(exchange, entry bytes needed by rank, room for them) of every exchange that is sized."""
    for n, needed in enumerate(layout.needed):
        if n >= DISTANCE:
            policy.add(max(layout.needed[n - DISTANCE].values()))
            yield n, needed, (policy.entry_bytes() + 15) // 16 * 16


def simulate(layouts: list[Layout], make: Callable[[], Policy]) -> Result:
    result = Result()
    for layout in layouts:
        for n, by_rank, room in sizes(layout, make()):
            result.sent_in_all += len(by_rank) * (layout.fixed + room)
            if n < SKIP:
                continue
            for needed in by_rank.values():
                late = max(0, needed - room)
                result.payload += layout.fixed + room
                result.padding += max(0, room - needed)
                result.chunks += layout.chunks
                if late:  # chunks are about equally large, and only whole ones go
                    result.dropped += -(-late * layout.chunks // needed)
    return result


def main() -> None:
    if len(sys.argv) > 3 and sys.argv[1] in ("record", "measure"):  # the rest is the script's own
        trace(Path(sys.argv[2]), sys.argv[3], sys.argv[4:], keep_sizes=sys.argv[1] == "measure")
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "measure", "simulate"))
    parser.add_argument("files", nargs="+", type=Path, help="simulate: CSV files of record")
    arguments = parser.parse_args()
    if arguments.command != "simulate":
        parser.error(f"{arguments.command}: expected a CSV file to write, a script, its arguments")
    runs = {path.stem: read(path) for path in arguments.files}
    columns = "".join(f" {name} |" for name in runs)
    print(
        f"After the first {SKIP} steps: padding / dropped chunks; then what all ranks send with "
        "the first steps.\n"
    )
    print(f"| entry bytes | of the last |{columns}\n|---|---|{'---|' * len(runs)}")
    for name, size, later_half, windows in RULES:
        for window in windows:
            make = functools.partial(Policy, window, size, later_half)
            cells = "".join(f" {simulate(layouts, make).cell()} |" for layouts in runs.values())
            print(f"| {name} | {window} |{cells}")


if __name__ == "__main__":
    main()
