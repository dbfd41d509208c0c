"""Study 1: a CNN with dense and compressed gradients, by SGD and Adam, with 1 to 128 learners.

    python examples/studies/study_cnn.py --data CIFAR10

Claim (section 4 of the paper): about 40x on convolutions without noticeable loss, for SGD with
momentum and Adam, up to 128 learners. Images are shrunk to 16x16 (CIFAR-10) and 14x14
(Fashion-MNIST). Learners share a mini-batch of 64 images, 128 of them one of 128.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from figures import (
    draw_errors,
    group_by,
    last_rows,
    mean_and_spread,
    method_of,
    percent,
    ratios,
    tidy,
)
from matplotlib.axes import Axes
from study import Row, Setting, Study, main

SEEDS = 3
STEPS = 3000
METHODS: tuple[dict[str, Any], ...] = (
    {"method": "dense"},
    {"scale": "layer"},
    {"scale": "bin"},
    {"scale": "layer", "factor": 3.0},
)


def settings(seed: int) -> list[Setting]:
    sgd = Setting("cifar16", steps=STEPS, seed=seed)
    adam = replace(sgd, optimizer="adam", lr=1e-3)
    fashion = replace(sgd, task="fashion14", steps=STEPS // 2)
    many = replace(sgd, learners=128, batch=1, steps=STEPS // 2)
    seeds = range(seed, seed + SEEDS)
    return [
        *(replace(sgd, seed=s, **m) for s in seeds for m in METHODS),
        *(replace(adam, seed=s, **m) for s in seeds for m in METHODS[:3]),
        *(replace(fashion, seed=s, **m) for s in seeds[:2] for m in METHODS[:3]),
        *(replace(sgd, learners=n, batch=64 // n, **m) for n in (1, 8, 32) for m in METHODS[1:3]),
        replace(many, method="dense"),
        *(replace(many, **m) for m in METHODS[1:3]),
    ]


def title_of(row: Row) -> str:
    data = "CIFAR-10, 16x16" if row["task"] == "cifar16" else "Fashion-MNIST, 14x14"
    return f"{data}, {'Adam' if row['optimizer'] == 'adam' else 'SGD, momentum'}"


def learners_of(row: Row) -> str:
    return row["learners"]


def draw(rows: list[Row], path: Path) -> None:
    last = last_rows(rows)
    panels = group_by([row for row in last if row["learners"] == "4"], title_of)
    figure, axes = plt.subplots(1, len(panels) + 1, figsize=(3.4 * (len(panels) + 1), 3.8))
    for panel, (title, inside) in zip(axes, panels.items(), strict=False):
        draw_errors(panel, group_by(inside, method_of))
        panel.set_title(title, fontsize=9)
    _draw_learners(axes[-1], last)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw_learners(axes: Axes, rows: list[Row]) -> None:
    cifar = [
        row
        for row in rows
        if row["task"] == "cifar16" and row["optimizer"] == "sgd" and float(row["factor"]) == 2
    ]
    for name, runs in group_by(cifar, method_of).items():
        points = sorted((int(n), group) for n, group in group_by(runs, learners_of).items())
        axes.plot(
            [n for n, _ in points],
            [100 * mean_and_spread(group, "test_error")[0] for _, group in points],
            "k*--" if name == "dense" else "o-",
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("learners (128: batch 128, half the steps)")
    axes.set_title("CIFAR-10, 16x16, SGD, by learners", fontsize=9)
    axes.legend(fontsize=7)
    tidy(axes)


def finding(rows: list[Row]) -> str:
    parts = []
    last = last_rows(rows)
    for title, inside in group_by(
        [row for row in last if row["learners"] == "4"], title_of
    ).items():
        errors = "; ".join(
            f"{name} {percent(runs)}" + ("" if name == "dense" else f" {ratios(runs)}")
            for name, runs in group_by(inside, method_of).items()
        )
        parts.append(f"{title}: {errors}")
    many = [
        f"{row['learners']} learners {method_of(row)} {float(row['test_error']):.1%}"
        for row in last
        if row["learners"] != "4"
    ]
    if many:
        parts.append("; ".join(many))
    return "Test error, mean ± deviation (runs). " + ". ".join(parts) + "."


STUDY = Study("cnn", settings, draw, finding)

if __name__ == "__main__":
    main(STUDY, __doc__)
