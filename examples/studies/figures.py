"""What the figures and findings of the studies share."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from study import Row, key_of_row

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
    """As "31.2% ± 0.4 (3)": mean, standard deviation, number of runs; "31.2% (1)" of one run."""
    rows = list(rows)
    mean, spread = mean_and_spread(rows, column)
    return f"{mean:.1%}" + (f" ± {100 * spread:.1f}" if len(rows) > 1 else "") + f" ({len(rows)})"


def ratio(rows: Iterable[Row], column: str = "sent_bytes") -> float:
    """Mean compression ratio of the last period of each run."""
    return statistics.fmean(number(row, "dense_bytes") / number(row, column) for row in rows)


def ratios(rows: Iterable[Row]) -> str:
    """As "at 31x (39x)": of the bytes sent, and of the bytes that payloads needed, which is more:
    all payloads of an exchange have the size of the largest of the last 16 exchanges."""
    rows = list(rows)
    return f"at {ratio(rows):.0f}x ({ratio(rows, 'needed_bytes'):.0f}x)"


def tidy(axes: Any) -> None:
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


# ---- panels --------------------------------------------------------------------------------------


def draw_errors(axes: Any, grouped: dict[str, list[Row]], column: str = "test_error") -> None:
    """A point per group with its deviation, a dot per run, the compression ratio below the name.

    Errors in percent, losses in nats.
    """
    factor, label = (100, "test error, %") if column == "test_error" else (1, "test loss, nats")
    names = []
    for x, (name, runs) in enumerate(grouped.items()):
        mean, spread = mean_and_spread(runs, column)
        axes.errorbar(x, factor * mean, factor * spread, fmt="o", capsize=4, markersize=5)
        if len(runs) > 1:
            values = [factor * number(row, column) for row in runs]
            axes.plot([x + 0.2] * len(runs), values, "k.", markersize=3)
        names.append(name if name == "dense" else f"{name} {ratio(runs):.0f}x")
    axes.set_xticks(range(len(names)), names, fontsize=7, rotation=35, ha="right")
    axes.set_ylabel(label)
    tidy(axes)


def draw_curves(
    axes: Any, rows: Iterable[Row], name_of: Callable[[Row], str], column: str = "test_loss"
) -> None:
    """A line per name over the steps: the mean over its runs."""
    for name, runs in group_by(rows, name_of).items():
        points = sorted((int(s), group) for s, group in group_by(runs, _step_of).items())
        axes.plot(
            [step for step, _ in points],
            [mean_and_spread(group, column)[0] for _, group in points],
            "k-" if name == "dense" else "-",
            label=name,
        )
    axes.set_xlabel("steps")
    axes.set_ylabel(column.replace("_", " "))
    axes.legend(fontsize=7)
    tidy(axes)


def _step_of(row: Row) -> str:
    return row["step"]
