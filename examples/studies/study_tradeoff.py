"""Study 5: accuracy against bytes: bins, factors, bin scales, beside PowerSGD and float16.

    python examples/studies/study_tradeoff.py --data CIFAR10

Also the claim that the rate falls as the mini-batch per learner grows (section 4): 8 to 512 samples
for each of two learners, at the default bins. Bytes are those that a learner gives to its
collective: an all-gather moves W - 1 payloads to each learner, a ring all-reduce about 2 gradients.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
from figures import (
    draw_curves,
    group_by,
    last_rows,
    mean_and_spread,
    method_of,
    number,
    percent,
    ratios,
    tidy,
)
from matplotlib.axes import Axes
from study import Row, Setting, Study, main

BINS = (25, 50, 100, 200, 400)
FACTORS = (1.0, 1.5, 2.5, 3.0)
BATCHES = (8, 32, 128, 512)


def settings(seed: int) -> list[Setting]:
    cnn = Setting("cifar16", steps=1500, seed=seed)
    points = [
        replace(cnn, method="dense"),
        replace(cnn, method="half"),
        *(replace(cnn, method="powersgd", amount=rank) for rank in (1, 2, 4)),
        *(replace(cnn, bins=f"*.weight={b}", scale="layer") for b in BINS),
        *(replace(cnn, bins=f"*.weight={b}", scale="bin") for b in BINS),
        *(replace(cnn, bins="*.weight=50", factor=f) for f in FACTORS),
    ]
    batches = [
        replace(setting, learners=2, batch=batch, steps=300)
        for batch in BATCHES
        for setting in (cnn, Setting("mlp14", lr=0.05, bins="*.weight=500", seed=seed))
    ]
    return [*points, *batches, *(replace(s, seed=seed + 1) for s in points)]


def is_point(row: Row) -> bool:
    return row["learners"] == "4"


def family_of(row: Row) -> str:
    if row["method"] == "powersgd":
        return "PowerSGD"
    if row["method"] == "adacomp" and float(row["factor"]) != 2:
        return "layer scale, bin 50, factors"
    return method_of(row)


def label_of(row: Row) -> str:
    if row["method"] == "powersgd":
        return f"rank {row['amount']}"
    if row["method"] != "adacomp":
        return ""
    size = row["bins"].rpartition("=")[2]
    return size if float(row["factor"]) == 2 else f"x{float(row['factor']):g}"


def draw(rows: list[Row], path: Path) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(13, 4.2))
    _draw_front(axes[0], [row for row in last_rows(rows) if is_point(row)])
    batches = [row for row in rows if not is_point(row)]
    for panel, (task, inside) in zip(axes[1:], group_by(batches, lambda r: r["task"]).items(),
                                     strict=False):  # fmt: skip
        draw_curves(panel, inside, lambda row: f"{row['batch']} per learner", "entries_per_bin")
        panel.set_yscale("log")
        panel.set_title(f"{task}, 2 learners", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw_front(axes: Axes, rows: list[Row]) -> None:
    for family, runs in group_by(rows, family_of).items():
        points = []
        for label, group in group_by(runs, label_of).items():
            points.append((mean_and_spread(group, "sent_bytes")[0] / 1000,
                           100 * mean_and_spread(group, "test_error")[0], label))  # fmt: skip
        points.sort()
        axes.plot([p[0] for p in points], [p[1] for p in points], "o-", label=family, markersize=4)
        for x, y, label in points:
            axes.annotate(label, (x, y), fontsize=6, xytext=(2, 3), textcoords="offset points")
    axes.set_xscale("log")
    axes.set_xlabel("kB per learner and step")
    axes.set_ylabel("test error, %")
    axes.set_title("CIFAR-10, 16x16, SGD, 4 learners", fontsize=9)
    axes.legend(fontsize=6)
    tidy(axes)


def finding(rows: list[Row]) -> str:
    last = last_rows(rows)
    points = "; ".join(
        f"{family_of(group[0])} {label_of(group[0])}".strip() + f" {percent(group)} {ratios(group)}"
        for group in group_by(
            [row for row in last if is_point(row)], lambda row: family_of(row) + label_of(row)
        ).values()
    )
    batches = "; ".join(
        f"{row['task']} {row['batch']}: {number(row, 'entries_per_bin'):.2f} entries per bin, "
        f"{ratios([row])}"
        for row in last
        if not is_point(row)
    )
    return f"Test error: {points}. By samples per learner: {batches}."


STUDY = Study("tradeoff", settings, draw, finding)

if __name__ == "__main__":
    main(STUDY, __doc__)
