"""Study 7: what makes the difference to dense training, one change at a time.

    python examples/studies/study_ablations.py --data CIFAR10

The CNN of study 1 with fewer steps: what is compressed, scales, warm-up, clipping, weight decay,
learning rate, Adam's beta2, momentum before the exchange or none at all. Every change that is more
than a matter of compression has a dense run of its own beside it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from figures import group_by, last_rows, mean_and_spread, percent, ratios, tidy
from study import Row, Setting, Study, main

SEEDS = 2
# Dense, layer scale and bin scale with each of these; of the second ones the layer scale only.
SHARED: dict[str, dict[str, Any]] = {
    "SGD, lr 0.02": {},
    "no momentum, lr 0.2": {"optimizer": "plain", "lr": 0.2},
    "Adam, lr 0.001": {"optimizer": "adam", "lr": 1e-3},
    "Adam, lr 0.003": {"optimizer": "adam", "lr": 3e-3},
    "Adam, lr 0.001, beta2 0.98": {"optimizer": "adam", "lr": 1e-3, "beta2": 0.98},
    "lr 0.005": {"lr": 0.005},
    "lr 0.05": {"lr": 0.05},
    "weight decay 0.002": {"weight_decay": 0.002},
    "clipped to 1 after": {"clip": 1.0},
}
COMPRESSED_ONLY: dict[str, dict[str, Any]] = {
    "biases compressed too": {"bins": "*.bias=50"},
    "first layer raw": {"bins": "0.weight=0"},
    "last layer raw": {"bins": "10.weight=0"},
    "first and last raw": {"bins": "0.weight=0,10.weight=0"},
    "warm-up 100": {"warm_up": 100},
    "warm-up 500": {"warm_up": 500},
    "momentum before": {"momentum_where": "learner"},
    "clipped to 1 before": {"clip": 1.0, "clip_where": "before"},
}


def settings(seed: int) -> list[Setting]:
    result = []
    for s in range(seed, seed + SEEDS):
        base = Setting("cifar16", steps=1500, seed=s)
        shared = [
            [replace(base, **change, method="dense"), replace(base, **change),
             replace(base, **change, scale="bin")]
            for change in SHARED.values()
        ]  # fmt: skip
        result += [*shared[0], *shared[1]]
        result += [replace(base, **change) for change in COMPRESSED_ONLY.values()]
        result += [setting for group in shared[2:] for setting in group]
    return result


def change_of(row: Row) -> str:
    """The name under which `settings` made this row's setting."""
    for name, change in {**COMPRESSED_ONLY, **SHARED}.items():
        expected = Setting("cifar16", **change)
        if all(
            row[column] == f"{value:.6g}" if isinstance(value, float) else row[column] == str(value)
            for column, value in vars(expected).items()
            if column not in ("steps", "seed", "method", "scale")
        ):
            return name
    raise ValueError(f"row: expected a setting of this study, got {row}")


def kind_of(row: Row) -> str:
    return "dense" if row["method"] == "dense" else f"{row['scale']} scale"


def draw(rows: list[Row], path: Path) -> None:
    changes = group_by(last_rows(rows), change_of)
    figure, axes = plt.subplots(figsize=(9, 5))
    markers = {"dense": "k_", "layer scale": "C0o", "bin scale": "C1s"}
    for x, runs in enumerate(changes.values()):
        for kind, some in group_by(runs, kind_of).items():
            mean, spread = mean_and_spread(some, "test_error")
            axes.errorbar(
                x, 100 * mean, 100 * spread, fmt=markers[kind], capsize=3,
                label=kind if x == 0 else None, markersize=9 if kind == "dense" else 5,
            )  # fmt: skip
    axes.set_xticks(range(len(changes)), list(changes), rotation=40, ha="right", fontsize=8)
    axes.set_ylabel("test error, %")
    axes.legend()
    tidy(axes)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def finding(rows: list[Row]) -> str:
    parts = []
    for name, runs in group_by(last_rows(rows), change_of).items():
        results = []
        for kind, some in group_by(runs, kind_of).items():
            text = f"{kind} {percent(some)}"
            results.append(text if kind == "dense" else f"{text} {ratios(some)}")
        parts.append(f"{name}: {', '.join(results)}")
    return "Test error, mean ± deviation (runs). " + "; ".join(parts) + "."


STUDY = Study("ablations", settings, draw, finding)

if __name__ == "__main__":
    main(STUDY, __doc__)
