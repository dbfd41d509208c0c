"""What time_to_quality.py makes of its cells: marks, seconds, tables, CSVs, figures."""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hooks import HOOKS
from rich.console import Console
from rich.table import Table

BLOCK = 10  # steps of which the median time is taken
COLOURS = {
    "allreduce": "#000000",
    "fp16": "#999999",
    "powersgd4": "#009E73",
    "layer": "#0072B2",
    "bin": "#D55E00",
}


@dataclass(frozen=True)
class Model:
    """Marks are (name, factor on dense's final quality); the first is the aim."""

    title: str
    quality: str
    higher_is_better: bool
    marks: tuple[tuple[str, float], ...]

    def reached(self, quality: float, mark: float) -> bool:
        return quality >= mark if self.higher_is_better else quality <= mark


MODELS = {
    "lstm": Model(
        "Character LSTM on Tiny Shakespeare",
        "validation loss (nats per character)",
        False,
        (("dense's final", 1.0), ("+ 2 %", 1.02), ("+ 5 %", 1.05)),
    ),
    "cnn": Model(
        "CNN on Fashion-MNIST",
        "test accuracy",
        True,
        (("99 % of dense's final", 0.99), ("98 %", 0.98), ("97 %", 0.97)),
    ),
}


# ---- quality and seconds -------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """One training. Points: step, bytes that left a host so far, quality."""

    model: str
    hook: str
    seed: int
    length: int
    points: list[tuple[int, int, float]]

    @property
    def final(self) -> float:
        return self.points[-1][2]

    @property
    def bytes_per_step(self) -> float:
        return self.points[-1][1] / self.points[-1][0]

    def first(self, mark: float) -> int | None:
        """The step of the first evaluation that reaches `mark`."""
        reached = MODELS[self.model].reached
        return next((step for step, _, quality in self.points if reached(quality, mark)), None)


@dataclass(frozen=True)
class Times:
    """`blocks[i]`: seconds per step of steps 10 i to 10 i + 9."""

    blocks: list[float]

    @classmethod
    def of(cls, repeats: list[list[float]]) -> Times:
        """From the seconds of each step: medians of ten, but the first ten, with their start-up,
        as they are; then the median over the repeats."""

        def blocks(seconds: list[float]) -> list[float]:
            tens = [seconds[i : i + BLOCK] for i in range(0, len(seconds), BLOCK)]
            return [statistics.fmean(tens[0]), *map(statistics.median, tens[1:])]

        return cls([statistics.median(same) for same in zip(*map(blocks, repeats), strict=True)])

    @property
    def step(self) -> float:
        """Seconds per step in the second half of the timed steps, and ever after."""
        return statistics.median(self.blocks[len(self.blocks) // 2 :])

    def until(self, step: int) -> float:
        """Seconds of the first `step` steps."""
        whole = min(step // BLOCK, len(self.blocks))
        return BLOCK * sum(self.blocks[:whole]) + (step - BLOCK * whole) * self.step


def reaches(model: str, points: list[dict[str, Any]], dense: list[dict[str, Any]]) -> bool:
    """Whether a training comes to the first mark at any evaluation."""
    mark = MODELS[model].marks[0][1] * float(dense[-1]["quality"])
    return any(MODELS[model].reached(point["quality"], mark) for point in points)


@dataclass(frozen=True)
class Reached:
    """A row of time_to_quality.csv. Without `step`: the mark was not reached at any length."""

    model: str
    network: str
    hook: str
    seed: int
    mark: str
    quality: float
    length: int | None
    step: int | None
    seconds: float | None
    times_faster: float | None  # than dense


def marks(dense: Curve) -> list[tuple[str, float]]:
    """By name, best first: those relative to the final quality, then dense's at its half-way."""
    middle = min(dense.points, key=lambda point: abs(point[0] - dense.length / 2))
    given = [(name, factor * dense.final) for name, factor in MODELS[dense.model].marks]
    return [*given, ("dense's half-way", middle[2])]


def reached(curves: list[Curve], times: dict[tuple[str, str, str], Times]) -> list[Reached]:
    """For every mark the soonest of a hook's trainings."""
    rows: list[Reached] = []
    for dense in (curve for curve in curves if curve.hook == "allreduce"):
        place = (dense.model, dense.seed)
        ours = [curve for curve in curves if (curve.model, curve.seed) == place]
        for (model, network, hook), clock in times.items():
            lengths = [curve for curve in ours if (curve.model, curve.hook) == (model, hook)]
            dense_clock = times.get((model, network, "allreduce"))
            if not lengths or dense_clock is None:
                continue
            for name, mark in marks(dense):
                row = (model, network, hook, dense.seed, name, mark)
                found = [(step, c.length) for c in lengths if (step := c.first(mark)) is not None]
                if not found:
                    rows.append(Reached(*row, None, None, None, None))
                    continue
                step, length = min(found)
                seconds, dense_step = clock.until(step), dense.first(mark)
                assert dense_step is not None
                ratio = dense_clock.until(dense_step) / seconds
                rows.append(Reached(*row, length, step, seconds, ratio))
    return rows


# ---- what is written -----------------------------------------------------------------------------


def write(
    curves: list[Curve],
    times: dict[tuple[str, str, str], Times],
    folder: Path,
    console: Console,
) -> None:
    rows = reached(curves, times)
    write_curves(curves, folder / "curves.csv")
    with (folder / "time_to_quality.csv").open("w", newline="") as file:
        names = list(Reached.__dataclass_fields__)
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*names, "step_ms", "wire_bytes_per_step", "final_quality"])
        for row in rows:
            shown = shown_curve(curves, row)
            clock = times[row.model, row.network, row.hook]
            figures = (f"{1e3 * clock.step:.2f}", f"{shown.bytes_per_step:.0f}")
            values = (getattr(row, name) for name in names)
            cells = (f"{v:.5g}" if isinstance(v, float) else v for v in values)
            writer.writerow([*cells, *figures, f"{shown.final:.5g}"])
    print_tables(curves, times, rows, console)
    for model in dict.fromkeys(curve.model for curve in curves):
        path = folder / f"time_to_quality_{model}.png"
        draw(model, curves, times, path)
        console.print(f"figure: {path}")
    console.print(f"rows: {folder / 'time_to_quality.csv'}, {folder / 'curves.csv'}")


def shown_curve(curves: list[Curve], row: Reached) -> Curve:
    """The training in which the mark was reached, else the longest."""
    same = (row.model, row.hook, row.seed)
    ours = [curve for curve in curves if (curve.model, curve.hook, curve.seed) == same]
    return next((c for c in ours if c.length == row.length), max(ours, key=lambda c: c.length))


def write_curves(curves: list[Curve], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("model", "hook", "seed", "length", "step", "wire_bytes", "quality"))
        for c in curves:
            for step, sent, quality in c.points:
                writer.writerow((c.model, c.hook, c.seed, c.length, step, sent, f"{quality:.6f}"))


def print_tables(
    curves: list[Curve],
    times: dict[tuple[str, str, str], Times],
    rows: list[Reached],
    console: Console,
) -> None:
    for model, seed, network in dict.fromkeys((r.model, r.seed, r.network) for r in rows):
        here = [r for r in rows if (r.model, r.seed, r.network) == (model, seed, network)]
        names = dict.fromkeys((row.mark, row.quality) for row in here)
        table = Table(title=f"{MODELS[model].title}, {network}, seed {seed}: seconds to quality")
        for column in ("hook", "step", "sent per step", "final, by steps"):
            table.add_column(column, justify="left" if column == "hook" else "right")
        for name, quality in names:
            table.add_column(f"{name}: {quality:.3f}", justify="right")
        for hook in dict.fromkeys(row.hook for row in here):
            trained = [c for c in curves if (c.model, c.seed, c.hook) == (model, seed, hook)]
            table.add_row(
                HOOKS[hook].description,
                f"{1e3 * times[model, network, hook].step:,.1f} ms",
                f"{trained[0].bytes_per_step / 1e3:,.1f} kB",
                "\n".join(f"{c.final:.3f} ({c.length:,})" for c in trained),
                *(words(row) for row in here if row.hook == hook),
            )
        console.print(table)


def words(row: Reached) -> str:
    if row.seconds is None:
        return "not reached"
    return f"{row.seconds:,.1f} s\n{row.times_faster:.2f}x, step {row.step:,} of {row.length:,}"


def draw(
    model: str, curves: list[Curve], times: dict[tuple[str, str, str], Times], path: Path
) -> None:
    """One panel per network; of a hook's seeds the first, of its lengths the longest."""
    from matplotlib.figure import Figure  # slow to import

    networks = list(dict.fromkeys(network for name, network, _ in times if name == model))
    if not networks:
        return
    figure = Figure(figsize=(5.5 * len(networks), 4.6), layout="constrained")
    panels = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    for axes, network in zip(panels, networks, strict=True):
        for curve in curves:
            clock = times.get((model, network, curve.hook))
            first = next(c for c in curves if c.model == curve.model).seed
            if clock is None or curve.model != model or curve.seed != first:
                continue
            longest = all(
                c.length <= curve.length
                for c in curves
                if (c.model, c.hook, c.seed) == (curve.model, curve.hook, curve.seed)
            )
            label = f"{HOOKS[curve.hook].description}, {curve.length:,} steps"
            axes.plot(
                [clock.until(step) for step, _, _ in curve.points[1:]],
                [quality for _, _, quality in curve.points[1:]],
                color=COLOURS.get(curve.hook),
                linestyle="-" if longest else ":",
                label=label,
            )
            if curve.hook == "allreduce":
                aim = MODELS[model].marks[0][1] * curve.final
                axes.axhline(aim, color="0.5", linestyle="--", linewidth=1)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.set_xlabel("seconds of training steps (log scale)")
        axes.set_title(network)
        axes.grid(color="0.9")
    panels[0].set_ylabel(MODELS[model].quality)
    panels[-1].legend(fontsize="small")
    figure.suptitle(f"{MODELS[model].title}, 2 ranks: quality against seconds")
    figure.savefig(path, dpi=130)
