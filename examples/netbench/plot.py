"""Draws the CSV of run.py: step times against bandwidth and ranks, bytes, gains beside the model.

python examples/netbench/plot.py netbench/netbench.csv [--model mlp] [--ranks 2] [--out FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results
from hooks import HOOKS
from network import parse_link
from results import Row
from workloads import WORKLOADS

# Okabe and Ito, with a marker each, so that colours are not needed to tell them apart.
STYLES = {
    "noop": ("#999999", "."),
    "allreduce": ("#000000", "o"),
    "fp16": ("#56B4E9", "v"),
    "bf16": ("#0072B2", "^"),
    "powersgd1": ("#F0E442", "<"),
    "powersgd4": ("#E69F00", ">"),
    "topk": ("#CC79A7", "D"),
    "layer": ("#009E73", "s"),
    "bin": ("#D55E00", "P"),
}
ADACOMP = ("layer", "bin")
Figures = dict[results.Place, dict[str, Row]]


def model_gain(dense_bytes: float, payload_bytes: float, ranks: int) -> float:
    """2C / W: bytes of a ring all-reduce, 2 (W - 1) / W of the gradients, over those of an
    all-gather, W - 1 payloads; C = dense_bytes / payload_bytes."""
    return 2 * dense_bytes / payload_bytes / ranks


def bandwidth(network: str, rows: dict[str, Row]) -> float:
    """Mbit/s: the rate; for an unlimited network what a connection carried."""
    rate = parse_link(network).bits_per_second
    return rate / 1e6 if rate is not None else max(row.goodput_mbit for row in rows.values())


def line(axes: Any, hook: str, points: list[tuple[float, float]]) -> None:
    if points:
        colour, marker = STYLES[hook]
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, color=colour, marker=marker, label=HOOKS[hook].description)


def draw_steps(axes: Any, places: Sequence[tuple[float, dict[str, Row]]]) -> None:
    for hook in HOOKS:
        points = [(x, rows[hook].step_ms) for x, rows in places if hook in rows]
        line(axes, hook, points)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylabel("step time (ms, log scale)")
    axes.grid(color="0.9")


def draw_bytes(axes: Any, rows: dict[str, Row]) -> None:
    hooks = [hook for hook in HOOKS if hook in rows and hook != "noop"]
    heights = [rows[hook].wire_bytes / 1e3 for hook in hooks]
    names = [HOOKS[hook].description for hook in hooks]
    bars = axes.barh(names, heights, color=[STYLES[hook][0] for hook in hooks])
    axes.bar_label(bars, [f" {height:,.0f}" for height in heights])
    axes.set_xscale("log")
    axes.set_xlim(right=10 * max(heights, default=1))
    axes.set_xlabel("sent per step and rank, with all headers (kB, log scale)")
    axes.invert_yaxis()


def gains(figures: Figures, model: str, hook: str) -> dict[str, list[tuple[float, float]]]:
    """Against the rate in Mbit/s: how many times AdaComp's exchange is smaller ("bytes", measured
    on the interface), quicker ("time", of what the step takes above noop), and 2C/W ("model")."""
    found: dict[str, list[tuple[float, float]]] = {"bytes": [], "time": [], "model": []}
    dense_bytes = 4 * sum(p.numel() for p in WORKLOADS[model].make().parameters())
    for (name, network, ranks), rows in figures.items():
        if name != model or not {"noop", "allreduce", hook} <= rows.keys():
            continue
        floor, dense, ours = rows["noop"], rows["allreduce"], rows[hook]
        x = bandwidth(network, rows)
        # On the wire an all-gather sends W - 1 payloads.
        payload = ours.wire_bytes / (ranks - 1)
        found["bytes"].append((x, dense.wire_bytes / ours.wire_bytes))
        found["model"].append((x, model_gain(dense_bytes, payload, ranks)))
        if ours.step_ms > floor.step_ms and dense.step_ms > floor.step_ms:
            gain = (dense.step_ms - floor.step_ms) / (ours.step_ms - floor.step_ms)
            found["time"].append((x, gain))
    return found


def draw_gains(axes: Any, figures: Figures, model: str) -> None:
    labels = {"time": "time above noop", "bytes": "bytes measured", "model": "2C/W"}
    markers, lines = {"time": "s", "bytes": "o", "model": ""}, {"model": "--"}
    for hook in ADACOMP:
        for what, points in gains(figures, model, hook).items():
            if points:
                x, y = zip(*sorted(points), strict=True)
                axes.plot(
                    x,
                    y,
                    color=STYLES[hook][0],
                    marker=markers[what],
                    linestyle=lines.get(what, "-"),
                    label=f"{hook} scale, {labels[what]}",
                )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("link (Mbit/s)")
    axes.set_ylabel("all-reduce / AdaComp, exchange only")
    axes.grid(color="0.9")
    if axes.lines:
        axes.legend(fontsize="small")


def draw(rows: list[Row], model: str, ranks: int, network: str, path: Path) -> None:
    """Raises ValueError if there is no row for `model` at `ranks`."""
    from matplotlib.figure import Figure  # slow to import

    all_figures = results.medians(row for row in rows if row.model == model)
    here = {place: hooks for place, hooks in all_figures.items() if place[2] == ranks}
    if not here:
        raise ValueError(f"expected rows of {model} at {ranks} ranks, got none")
    figure = Figure(figsize=(13, 9), layout="constrained")
    (by_rate, by_ranks), (sent, gain) = figure.subplots(2, 2)
    draw_steps(by_rate, [(bandwidth(net, hooks), hooks) for (_, net, _), hooks in here.items()])
    by_rate.set_xlabel(f"link (Mbit/s; rightmost may be unlimited), {ranks} ranks")
    by_rate.legend(fontsize="small")
    scaling = [(w, hooks) for (_, net, w), hooks in all_figures.items() if net == network]
    draw_steps(by_ranks, scaling)
    by_ranks.set_xscale("linear")
    by_ranks.set_xticks(sorted({w for w, _ in scaling}))
    by_ranks.set_xlabel(f"ranks, {network} (all ranks share this machine's cores)")
    draw_bytes(sent, here.get((model, network, ranks)) or next(iter(here.values())))
    draw_gains(gain, here, model)
    figure.suptitle(WORKLOADS[model].description)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path)
    parser.add_argument("--model", choices=WORKLOADS, default="mlp")
    parser.add_argument("--ranks", type=int, default=2, help="of the panels against bandwidth")
    parser.add_argument("--network", default="1gbit", help="of the panels against ranks and bytes")
    parser.add_argument("--out", type=Path, help="default: the CSV's name with .png")
    args = parser.parse_args()
    path = args.out or args.csv.with_suffix(".png")
    try:
        draw(results.read(args.csv), args.model, args.ranks, args.network, path)
    except ValueError as error:
        sys.exit(f"error: {args.csv}: {error}")
    print(path)


if __name__ == "__main__":
    main()
