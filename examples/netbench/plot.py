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
MODELLED = ("allreduce", *ADACOMP)
Figures = dict[results.Place, dict[str, Row]]


def model_gain(dense_bytes: float, payload_bytes: float, ranks: int) -> float:
    """2C / W: bytes of a ring all-reduce, 2 (W - 1) / W of the gradients, over those of an
    all-gather, W - 1 payloads; C = dense_bytes / payload_bytes."""
    return 2 * dense_bytes / payload_bytes / ranks


def rate_of(network: str) -> float:
    """Mbit/s, inf for "unlimited"."""
    bits = parse_link(network).bits_per_second
    return float("inf") if bits is None else bits / 1e6


def modelled_ms(row: Row, floor: Row) -> float | None:
    """Step time if nothing overlapped: noop's step, the codec, and the sent bytes at the rate."""
    rate = rate_of(row.network)
    if rate == float("inf"):
        return None
    return floor.step_ms + row.compress_ms + row.decompress_ms + 8 * row.wire_bytes / rate / 1e3


def line(axes: Any, hook: str, points: list[tuple[Any, float]], **style: Any) -> None:
    if points:
        colour, marker = STYLES[hook]
        style = {"marker": marker, "label": HOOKS[hook].description, **style}
        x, y = zip(*points, strict=True)
        axes.plot(x, y, color=colour, **style)


def draw_steps(axes: Any, places: Sequence[tuple[str, dict[str, Row]]]) -> None:
    """`places`: (name on the axis, rows by hook), from left to right."""
    axes.plot([name for name, _ in places], [float("nan")] * len(places))  # fixes the order
    for hook in HOOKS:
        rows = [(name, hooks[hook], hooks.get("noop")) for name, hooks in places if hook in hooks]
        line(axes, hook, [(name, row.step_ms) for name, row, _ in rows])
        if hook in MODELLED:
            model = [(name, modelled_ms(row, floor)) for name, row, floor in rows if floor]
            points = [(name, ms) for name, ms in model if ms is not None]
            line(axes, hook, points, marker="", linestyle=":", label=f"{hook}: noop + codec + wire")
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


def gains(figures: Figures, model: str, hook: str) -> dict[str, list[tuple[str, float]]]:
    """By network: how many times AdaComp's exchange is smaller ("bytes", measured on the
    interface), quicker ("time", of what the step takes above noop), and 2C/W ("model")."""
    found: dict[str, list[tuple[str, float]]] = {"time": [], "bytes": [], "model": []}
    dense_bytes = 4 * sum(p.numel() for p in WORKLOADS[model].make().parameters())
    for (name, network, ranks), rows in figures.items():
        if name != model or not {"noop", "allreduce", hook} <= rows.keys():
            continue
        floor, dense, ours = rows["noop"], rows["allreduce"], rows[hook]
        payload = ours.wire_bytes / (ranks - 1)  # on the wire an all-gather sends W - 1 payloads
        found["bytes"].append((network, dense.wire_bytes / ours.wire_bytes))
        found["model"].append((network, model_gain(dense_bytes, payload, ranks)))
        if ours.step_ms > floor.step_ms and dense.step_ms > floor.step_ms:
            gain = (dense.step_ms - floor.step_ms) / (ours.step_ms - floor.step_ms)
            found["time"].append((network, gain))
    return found


GAIN_STYLES = {
    "time": {"label": "time above noop"},
    "bytes": {"label": "bytes measured", "marker": "", "linestyle": "--"},
    "model": {"label": "2C/W", "marker": "x", "linestyle": ""},
}


def draw_gains(axes: Any, figures: Figures, model: str) -> None:
    axes.plot([network for _, network, _ in figures], [float("nan")] * len(figures))
    for hook in ADACOMP:
        for what, points in gains(figures, model, hook).items():
            style = GAIN_STYLES[what]
            line(axes, hook, points, **{**style, "label": f"{hook} scale, {style['label']}"})
    axes.axhline(1, color="0.5", linewidth=1)
    axes.set_yscale("log")
    axes.set_xlabel("link")
    axes.set_ylabel("all-reduce / AdaComp, exchange only")
    axes.grid(color="0.9")
    if len(axes.lines) > 2:
        axes.legend(fontsize="small")


def draw(rows: list[Row], model: str, ranks: int, network: str, path: Path) -> None:
    """Raises ValueError if there is no row for `model` at `ranks`."""
    from matplotlib.figure import Figure  # slow to import

    all_figures = results.medians(row for row in rows if row.model == model)
    by_place = sorted(all_figures.items(), key=lambda item: (rate_of(item[0][1]), item[0][2]))
    here = {place: hooks for place, hooks in by_place if place[2] == ranks}
    if not here:
        raise ValueError(f"expected rows of {model} at {ranks} ranks, got none")
    figure = Figure(figsize=(15, 9), layout="constrained")
    (by_rate, by_ranks), (sent, gain) = figure.subplots(2, 2)
    draw_steps(by_rate, [(net, hooks) for (_, net, _), hooks in here.items()])
    by_rate.set_xlabel(f"link, {ranks} ranks")
    draw_steps(by_ranks, [(str(w), hooks) for (_, net, w), hooks in by_place if net == network])
    figure.legend(handles=by_rate.get_legend_handles_labels()[0], loc="outside right upper")
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
