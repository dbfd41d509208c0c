"""Study 4: a small character Transformer with AdamW: bins by kind of parameter.

    python examples/studies/study_transformer.py

The paper has no Transformer. Two layers of width 96 (0.24 M parameters): what do bins of 50, 500
and 5,000 do to attention, feed-forward, embeddings, and what does it cost to compress the norms?
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
from figures import draw_errors, group_by, last_rows, mean_and_spread, ratios
from study import Row, Setting, Study, main

ATTENTION = "blocks.*.qkv.weight={0},blocks.*.out.weight={0}"
FEED = "blocks.*.feed.*.weight={0}"
EMBEDDINGS = "embedding.weight={0},position={0},linear.weight={0}"
VARIANTS = {
    "default bins": "default",
    "bin scale": "default",
    "all 50": ",".join((ATTENTION, FEED, EMBEDDINGS)).format(50),
    "all 5000": ",".join((ATTENTION, FEED, EMBEDDINGS)).format(5000),
    "embeddings 50": EMBEDDINGS.format(50),
    "attention 5000": ATTENTION.format(5000),
    "feed-forward 5000": FEED.format(5000),
    "embeddings 5000": EMBEDDINGS.format(5000),
    "norms, biases at 50": "*norm*=50,*.bias=50",
}


def settings(seed: int) -> list[Setting]:
    base = Setting("transformer", batch=4, steps=1200, optimizer="adamw", lr=3e-3, seed=seed)
    base = replace(base, weight_decay=0.1, beta2=0.99)
    variants = [
        replace(base, bins=bins, scale="bin" if name == "bin scale" else "layer")
        for name, bins in VARIANTS.items()
    ]
    first = [replace(base, method="dense"), *variants]
    return [*first, *(replace(s, seed=seed + 1) for s in first[:5])]


def name_of(row: Row) -> str:
    if row["method"] == "dense":
        return "dense"
    if row["scale"] == "bin":
        return "bin scale"
    return next(name for name, bins in VARIANTS.items() if bins == row["bins"])


def draw(rows: list[Row], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4.2))
    draw_errors(axes, group_by(last_rows(rows), name_of), "test_loss")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def finding(rows: list[Row]) -> str:
    results = []
    for name, runs in group_by(last_rows(rows), name_of).items():
        loss, spread = mean_and_spread(runs, "test_loss")
        text = f"{name} {loss:.3f}" + (f" ± {spread:.3f}" if len(runs) > 1 else "")
        text += f" ({len(runs)})"
        results.append(text if name == "dense" else f"{text} {ratios(runs)}")
    return "Test loss in nats, mean ± deviation (runs): " + "; ".join(results) + "."


STUDY = Study("transformer", settings, draw, finding)

if __name__ == "__main__":
    main(STUDY, __doc__)
