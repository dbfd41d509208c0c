"""Study 3: a character LSTM on Tiny Shakespeare at bins of 100, 500 and 5,000.

    python examples/studies/study_lstm.py

Claim (section 4): 200x on recurrent layers at bin 500 without noticeable loss. Compressed training
lags behind in the first steps: does the lag vanish? So some runs are three times as long. And Adam
divides by the root of the mean square of what it is given: an element sent as a spike every k steps
has k times the mean square of one sent in k parts. So Adam is tried at other rates too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
from figures import draw_curves, group_by, last_rows, mean_and_spread, number, ratios
from study import Row, Setting, Study, main

PATTERN = "*weight*={0},*bias*=50"
BINS = (100, 500, 5000)
USUAL_RATES = ("0.004", "1")  # of Adam and SGD


def settings(seed: int) -> list[Setting]:
    adam = Setting("lstm", batch=4, steps=1500, optimizer="adam", lr=4e-3, seed=seed)
    sgd = replace(adam, optimizer="sgd", lr=1.0, clip=1.0)
    longer = replace(adam, steps=3 * adam.steps)
    again = replace(adam, seed=seed + 1)
    half = replace(adam, bins=PATTERN.format(500))
    dense = replace(adam, method="dense")
    return [
        dense,
        *(replace(adam, bins=PATTERN.format(b)) for b in BINS),
        replace(half, scale="bin"),
        *(replace(s, lr=lr) for lr in (8e-3, 16e-3, 2e-3) for s in (half, dense)),
        replace(sgd, method="dense"),
        *(replace(sgd, bins=PATTERN.format(b)) for b in BINS),
        replace(again, method="dense"),
        replace(again, bins=half.bins),
        replace(again, bins=half.bins, scale="bin"),
        replace(longer, method="dense"),
        replace(longer, bins=half.bins),
        replace(longer, bins=half.bins, scale="bin"),
    ]


def name_of(row: Row) -> str:
    rate = "" if row["lr"] in USUAL_RATES else f", lr {row['lr']}"
    if row["method"] == "dense":
        return "dense" + rate
    size = row["bins"].partition("=")[2].partition(",")[0]
    return f"{row['scale']} scale, bin {size}{rate}"


def setup_of(row: Row) -> str:
    kind = "Adam" if row["optimizer"] == "adam" else "SGD, momentum, clipped"
    return f"{kind}, {row['steps']} steps"


def draw(rows: list[Row], path: Path) -> None:
    setups = group_by(rows, setup_of)
    figure, axes = plt.subplots(1, len(setups), figsize=(4.2 * len(setups), 3.6), squeeze=False)
    for panel, (setup, inside) in zip(axes[0], setups.items(), strict=True):
        draw_curves(panel, inside, name_of)
        panel.set_title(setup, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def lag(runs: list[Row], dense: list[Row], share: float) -> float:
    """How much higher the test loss is than the dense one after `share` of the steps."""
    steps = sorted({int(row["step"]) for row in dense})
    step = min(steps, key=lambda s: abs(s - share * steps[-1]))
    losses = [
        mean_and_spread([row for row in some if int(row["step"]) == step], "test_loss")[0]
        for some in (runs, dense)
    ]
    return losses[0] / losses[1] - 1


def finding(rows: list[Row]) -> str:
    parts = []
    for setup, inside in group_by(rows, setup_of).items():
        runs = group_by(inside, name_of)
        if "dense" not in runs:
            continue
        results = [f"dense {number(last_rows(runs['dense'])[0], 'test_loss'):.3f} nats"]
        for name, some in runs.items():
            if name != "dense":
                seeds = {row["seed"] for row in some}
                dense = [row for row in runs["dense"] if row["seed"] in seeds]
                gaps = ", ".join(
                    f"{100 * lag(some, dense, share):+.1f}" for share in (0.25, 0.5, 1)
                )
                results.append(f"{name} {gaps} % {ratios(last_rows(some))}")
        parts.append(f"{setup}: " + "; ".join(results))
    return "Test loss above dense after 1/4, 1/2, all of the steps. " + ". ".join(parts) + "."


STUDY = Study("lstm", settings, draw, finding, evaluations=12)

if __name__ == "__main__":
    main(STUDY, __doc__)
