"""What the figures and findings of the studies share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from study import KEY, Row, key_of_row

METHODS = {"dense": "dense", "topk": "top-k", "powersgd": "PowerSGD", "half": "float16"}


def last_rows(rows: Iterable[Row]) -> list[Row]:
    """The last row of every setting."""
    return list({key_of_row(row): row for row in rows}.values())


def method_of(row: Row) -> str:
    """A name for a legend: method, scale and factor."""
    if row["method"] == "powersgd":
        return f"PowerSGD rank {row['amount']}"
    if row["method"] != "adacomp":
        return METHODS[row["method"]]
    factor = float(row["factor"])
    if factor == 1:
        return f"{row['scale']} scale, local selection"
    return f"{row['scale']} scale" + ("" if factor == 2 else f", factor {factor:g}")


def groups(rows: Iterable[Row], *, without: str = "seed") -> dict[tuple[str, ...], list[Row]]:
    """Rows whose settings differ only in the column `without`."""
    result: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        result.setdefault(tuple(row[k] for k in KEY if k != without), []).append(row)
    return result


def group_by(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    result: dict[str, list[Row]] = {}
    for row in rows:
        result.setdefault(key(row), []).append(row)
    return result


def number(row: Row, column: str) -> float:
    return float(row[column] or "nan")


def mean_and_spread(rows: Iterable[Row], column: str) -> tuple[float, float]:
    """Mean and standard deviation (0 for one row)."""
    values = [number(row, column) for row in rows]
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def percent(rows: Iterable[Row], column: str = "test_error") -> str:
    """As "31.2 % +- 0.4 (3)": mean, standard deviation, number of runs."""
    rows = list(rows)
    mean, spread = mean_and_spread(rows, column)
    return f"{mean:.1%} ± {100 * spread:.1f} ({len(rows)})"


def ratio(rows: Iterable[Row], column: str = "sent_bytes") -> float:
    """Mean compression ratio of the last period of each run."""
    return statistics.fmean(number(row, "dense_bytes") / number(row, column) for row in rows)


def tidy(axes: Any) -> None:
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
