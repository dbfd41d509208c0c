"""Study 2: a fully connected net at bins of 50 to 5,000, with and without the soft threshold.

    python examples/studies/study_mlp.py --data CIFAR10

Claims (sections 3 and 4): 200x on fully connected layers at bin 500, up to about 2,000x at 5,000;
plain local selection (factor 1) blows up from bin 300 on where AdaComp's residuals stay bounded.
Compared with top-k of the whole model with error feedback, at about the same bytes. Local selection
is tried at larger learning rates, with Adam, and on a CNN (the paper saw it fail on one).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
from figures import draw_curves, group_by, last_rows, number, percent, ratios, tidy
from study import Row, Setting, Study, main

BINS = (50, 500, 5000)


def settings(seed: int) -> list[Setting]:
    base = Setting("mlp14", batch=32, steps=1200, lr=0.05, seed=seed)

    def both(setting: Setting, *bins: int) -> list[Setting]:
        return [replace(setting, bins=f"*.weight={b}", factor=f) for b in bins for f in (2.0, 1.0)]

    result = [
        replace(base, method="dense"),
        *both(base, *BINS),
        *(replace(base, method="topk", amount=amount) for amount in (28_000, 4_000)),
    ]
    for lr in (0.1, 0.2):
        faster = replace(base, lr=lr)
        result += [replace(faster, method="dense"), *both(faster, 500, 5000)]
    for lr in (0.02, 0.05):
        cnn = Setting("cifar16", steps=2000, lr=lr, seed=seed)
        result += [replace(cnn, method="dense"), *both(cnn, 300, 1000)]
    adam = replace(base, optimizer="adam", lr=1e-3)
    result += [replace(adam, method="dense"), *both(adam, 500, 5000)]
    again = replace(base, seed=seed + 1)
    result += [replace(again, method="dense"), *both(again, 500, 5000)]
    longer = replace(base, steps=3 * base.steps)
    return [
        *result,
        replace(longer, method="dense"),
        *(replace(longer, bins=f"*.weight={b}") for b in BINS[1:]),
        *(replace(longer, bins=f"*.weight={b}", scale="bin") for b in BINS[1:]),
        replace(longer, method="topk", amount=4_000),
    ]


def bin_of(row: Row) -> str:
    return row["bins"].rpartition("=")[2]


def name_of(row: Row) -> str:
    if row["method"] == "topk":
        return f"top-k, {int(row['amount']) / 1000:g} kB"
    if row["method"] == "dense":
        return "dense"
    kind = "local selection" if float(row["factor"]) == 1 else "AdaComp"
    scale = ", bin scale" if row["scale"] == "bin" else ""
    return f"{kind}, bin {bin_of(row)}{scale}"


def setup_of(row: Row) -> str:
    return f"{row['task']}, {row['optimizer']}, lr {row['lr']}, {row['steps']} steps"


def draw(rows: list[Row], path: Path) -> None:
    setups = group_by(rows, setup_of)
    figure, axes = plt.subplots(2, len(setups), figsize=(3.3 * len(setups), 6.4), squeeze=False)
    for (loss, residual), (setup, inside) in zip(axes.T, setups.items(), strict=True):
        draw_curves(loss, inside, name_of)
        loss.set_title(setup, fontsize=9)
        loss.set_yscale("log")
        compressed = [row for row in inside if row["method"] == "adacomp"]
        for kind, style in (("residual_max", "-"), ("residual_p50", ":")):
            for i, (name, runs) in enumerate(group_by(compressed, name_of).items()):
                first = [row for row in runs if row["seed"] == runs[0]["seed"]]
                residual.plot(
                    [int(row["step"]) for row in first],
                    [number(row, kind) for row in first],
                    style,
                    color=f"C{i}",
                    label=name if style == "-" else None,
                )
        residual.set_yscale("log")
        residual.set_ylabel("|residual|: largest, median (dotted)")
        residual.legend(fontsize=6)
        tidy(residual)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def finding(rows: list[Row]) -> str:
    parts = []
    for setup, inside in group_by(last_rows(rows), setup_of).items():
        results = []
        for name, runs in group_by(inside, name_of).items():
            text = f"{name} {percent(runs)}"
            if name != "dense":
                text += f" {ratios(runs)}"
            if runs[0]["method"] == "adacomp":
                largest = max(number(row, "residual_max") for row in runs)
                text += f", largest residual {largest:.3g}"
            ended = any(row["diverged"] == "1" for row in runs)
            results.append(text + (" DIVERGED" if ended else ""))
        parts.append(f"{setup}: " + "; ".join(results))
    return "Test error, mean ± deviation (runs). " + ". ".join(parts) + "."


STUDY = Study("mlp", settings, draw, finding, evaluations=12)

if __name__ == "__main__":
    main(STUDY, __doc__)
