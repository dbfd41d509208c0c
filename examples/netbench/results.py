"""The CSV of measurements: one row per case and repeat, written as soon as it is known."""

from __future__ import annotations

import csv
import io
import os
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import get_type_hints

Key = tuple[str, str, int, str, int]


@dataclass(frozen=True)
class Row:
    """Times are milliseconds per step, bytes are per step and rank. 0 where there is no figure."""

    model: str
    network: str
    ranks: int
    hook: str
    repeat: int
    status: str  # ok, failed, hang
    reason: str = ""
    step_ms: float = 0.0  # median over the steps, of the slowest rank
    step_ms_p10: float = 0.0
    step_ms_p90: float = 0.0
    steps: int = 0
    cpu_ms: float = 0.0  # processor time of a rank, without what the kernel does for the network
    wire_bytes: float = 0.0  # that left the host, with all headers
    compress_ms: float = 0.0  # host times, from the hooks that know them
    exchange_ms: float = 0.0
    decompress_ms: float = 0.0
    goodput_mbit: float = 0.0  # of the link, measured with one connection before the case
    busy_cores: float = 0.0  # cores at work for others, just before the case

    @property
    def key(self) -> Key:
        return (self.model, self.network, self.ranks, self.hook, self.repeat)


COLUMNS = [field.name for field in fields(Row)]
_TYPES = get_type_hints(Row)


def _line(values: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


def _cell(value: object) -> object:
    return f"{value:.4f}" if isinstance(value, float) else value


def read(path: Path) -> list[Row]:
    """All rows; none if there is no file. Raises ValueError for a file of other columns.

    A last line without its end, from a kill in the middle of writing, is cut off the file.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        os.truncate(path, len(whole))
    reader = csv.DictReader(io.StringIO(whole.decode()))
    if whole and reader.fieldnames != COLUMNS:
        raise ValueError(f"{path}: expected the columns {COLUMNS}, got {reader.fieldnames}")
    return [Row(**{name: _TYPES[name](text) for name, text in row.items()}) for row in reader]


def append(path: Path, row: Row) -> None:
    """One line, complete with its end or recognised by `read`."""
    # A reason must not bring line ends into the file: `read` counts on one line per row.
    values = [" ".join(v.split()) if isinstance(v, str) else v for v in asdict(row).values()]
    is_new = not path.exists() or path.stat().st_size == 0
    with path.open("a") as file:
        file.write((_line(COLUMNS) if is_new else "") + _line(map(_cell, values)))


Place = tuple[str, str, int]


def medians(rows: Iterable[Row]) -> dict[Place, dict[str, Row]]:
    """(model, network, ranks) -> hook -> the repeat with the median step time; ok rows only."""
    groups: dict[Place, dict[str, list[Row]]] = {}
    for row in rows:
        if row.status == "ok":
            group = groups.setdefault((row.model, row.network, row.ranks), {})
            group.setdefault(row.hook, []).append(row)
    return {place: {h: _median(r) for h, r in hooks.items()} for place, hooks in groups.items()}


def _median(rows: list[Row]) -> Row:
    middle = statistics.median_low([row.step_ms for row in rows])
    return next(row for row in rows if row.step_ms == middle)
