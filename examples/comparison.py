"""What the demo shows of its runs: tables, verdicts on the targets, a picture, a CSV of curves."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common import DESCRIPTIONS, Ranks
from rich.table import Table

# What the project set out to reach, in 1,000 steps.
TARGET_STEPS = 1000
TARGET_ABOVE_DENSE = {"layer": 0.07, "bin": 0.05}
TARGET_RATIO = 100
TARGET_FEWER_BYTES = 50

COLOURS = {"dense": "#000000", "layer": "#0072B2", "bin": "#D55E00"}  # Okabe and Ito
MARKERS = {"dense": "o", "layer": "s", "bin": "^"}


@dataclass(frozen=True)
class Point:
    step: int
    bytes_sent: int  # by this rank since the start
    loss: float  # validation, nats per character


@dataclass
class Run:
    kind: str
    dense_bytes_per_step: int
    points: list[Point] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of each training step

    @property
    def loss(self) -> float:
        return self.points[-1].loss

    @property
    def bytes_per_step(self) -> float:
        return self.points[-1].bytes_sent / self.points[-1].step

    @property
    def steady_bytes_per_step(self) -> float:
        """Over the second half of the run, when payloads have found their size."""
        middle, last = at_step(self, self.points[-1].step // 2), self.points[-1]
        return (last.bytes_sent - middle.bytes_sent) / (last.step - middle.step)

    @property
    def steady_ratio(self) -> float:
        return self.dense_bytes_per_step / self.steady_bytes_per_step

    @property
    def ratio(self) -> float:
        """The same as stats()["compression_ratio"] at the end of the run."""
        return self.dense_bytes_per_step / self.bytes_per_step


def at_step(run: Run, step: int) -> Point:
    return next(point for point in run.points if point.step == step)


# ---- comparison ----------------------------------------------------------------------------------


def loss_at_bytes(run: Run, budget: float) -> float | None:
    """Validation loss after `budget` bytes, between two evaluations; None if never there."""
    for before, after in zip(run.points, run.points[1:], strict=False):
        if before.bytes_sent <= budget <= after.bytes_sent:
            share = (budget - before.bytes_sent) / (after.bytes_sent - before.bytes_sent)
            return before.loss + share * (after.loss - before.loss)
    return None


def first_at_loss(run: Run, loss: float) -> Point | None:
    """The first evaluation at or below `loss`."""
    return next((point for point in run.points if point.loss <= loss), None)


def fewer_bytes(run: Run, dense: Run) -> float | None:
    """By which factor `run` needed fewer bytes than dense to dense's loss at half of the steps."""
    middle = at_step(dense, dense.points[-1].step // 2)
    reached = first_at_loss(run, middle.loss)
    return middle.bytes_sent / reached.bytes_sent if reached and reached.bytes_sent else None


def above(run: Run, dense: Run) -> float:
    return run.loss / dense.loss - 1


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.2f} MB"


def kilobytes(count: float) -> str:
    return f"{count / 1e3:,.1f} kB"


def print_table(
    title: str,
    caption: str,
    runs: list[Run],
    rows: list[tuple[str, Callable[[Run], str]]],
    ranks: Ranks,
) -> None:
    """One column per run, one row per quantity: fits a terminal of 80 columns."""
    table = Table(title=title, caption=caption, caption_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(DESCRIPTIONS[run.kind], justify="right")
    for name, text_of in rows:
        table.add_row(name, *map(text_of, runs))
    ranks.console.print(table)


def print_equal_steps(runs: dict[str, Run], bin_sizes: str, ranks: Ranks) -> None:
    dense = runs.get("dense")

    def against_dense(run: Run) -> str:
        return "-" if dense is None or run is dense else f"{above(run, dense):+.1%}"

    print_table(
        f"Equal steps: after {next(iter(runs.values())).points[-1].step:,} steps",
        "Sent: bytes that one rank hands to the gradients' collectives, every header counted. "
        "Compression ratio: bytes of the gradients / sent. kB = 1,000 bytes. "
        f"Bin sizes: {bin_sizes}.",
        list(runs.values()),
        [
            ("validation loss", lambda run: f"{run.loss:.3f}"),
            ("  against dense", against_dense),
            ("sent per step", lambda run: kilobytes(run.bytes_per_step)),
            ("  in the second half", lambda run: kilobytes(run.steady_bytes_per_step)),
            ("compression ratio", lambda run: f"{run.ratio:.1f}x"),
            ("  in the second half", lambda run: f"{run.steady_ratio:.1f}x"),
            ("step time, median", lambda run: f"{statistics.median(run.seconds) * 1e3:.0f} ms"),
        ],
        ranks,
    )


def print_equal_bytes(runs: dict[str, Run], ranks: Ranks) -> None:
    dense = runs["dense"]
    middle = at_step(dense, dense.points[-1].step // 2)

    def same_bytes(run: Run) -> str:
        loss = loss_at_bytes(dense, run.points[-1].bytes_sent)
        return "-" if loss is None else f"{loss:.3f}"

    def to_halfway(run: Run) -> str:
        reached = first_at_loss(run, middle.loss)
        return megabytes(reached.bytes_sent) if reached else "not reached"

    def factor(run: Run) -> str:
        times = fewer_bytes(run, dense)
        return "-" if times is None else f"{times:.1f}x"

    print_table(
        "Equal bytes",
        f"Dense's halfway loss is {middle.loss:.3f}, after {middle.step:,} steps and "
        f"{megabytes(middle.bytes_sent)}; the others' bytes are those up to their first evaluation "
        "at or below it. Dense's loss at other bytes is interpolated between two evaluations.",
        [run for run in runs.values() if run is not dense],
        [
            ("sent in all", lambda run: megabytes(run.points[-1].bytes_sent)),
            ("validation loss", lambda run: f"{run.loss:.3f}"),
            ("dense, after the same bytes", same_bytes),
            ("sent up to dense's halfway loss", to_halfway),
            ("  fewer bytes than dense", factor),
        ],
        ranks,
    )


def print_targets(runs: dict[str, Run], ranks: Ranks) -> None:
    dense = runs["dense"]
    for run in (run for run in runs.values() if run is not dense):
        excess, limit = above(run, dense), TARGET_ABOVE_DENSE[run.kind]
        factor = fewer_bytes(run, dense)
        bytes_words = (
            "never reached" if factor is None else f"reached with {factor:.0f}x fewer bytes"
        )
        ranks.console.print(
            f"{run.kind}: validation loss {excess:+.1%} against dense, target at most "
            f"{limit:+.0%}: {verdict(excess <= limit)}.\n"
            f"{run.kind}: {run.ratio:.0f}x on the wire over the whole run, target at least "
            f"{TARGET_RATIO}x: {verdict(run.ratio >= TARGET_RATIO)}.\n"
            f"{run.kind}: dense's halfway loss {bytes_words}, target at least "
            f"{TARGET_FEWER_BYTES}x: {verdict((factor or 0) >= TARGET_FEWER_BYTES)}.",
            soft_wrap=True,
        )
    if dense.points[-1].step < TARGET_STEPS:
        ranks.console.print(
            f"The targets are for {TARGET_STEPS:,} steps; this was {dense.points[-1].step:,}."
        )


def verdict(reached: bool) -> str:
    return "reached" if reached else "NOT reached"


# ---- files ---------------------------------------------------------------------------------------


def write_csv(runs: dict[str, Run], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("run", "step", "bytes_sent_per_rank", "validation_loss"))
        for run in runs.values():
            for point in run.points:
                writer.writerow((run.kind, point.step, point.bytes_sent, f"{point.loss:.6f}"))


def write_picture(runs: dict[str, Run], path: Path) -> None:
    from matplotlib.figure import Figure  # slow to import; only rank 0 comes here

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    by_step, by_bytes = figure.subplots(1, 2, sharey=True)
    for run in runs.values():
        style = {
            "color": COLOURS[run.kind],
            "marker": MARKERS[run.kind],
            "markersize": 4,
            "label": DESCRIPTIONS[run.kind],
        }
        losses = [point.loss for point in run.points]
        by_step.plot([point.step for point in run.points], losses, **style)
        by_bytes.plot([point.bytes_sent / 1e6 for point in run.points[1:]], losses[1:], **style)
    by_step.set_xlabel("training step")
    by_step.set_ylabel("validation loss (nats per character)")
    by_bytes.set_xscale("log")
    by_bytes.xaxis.set_major_formatter("{x:,g}")
    by_bytes.set_xlabel("gradient bytes sent per rank since the start (MB, log scale)")
    if "dense" in runs:
        dense = runs["dense"]
        middle = at_step(dense, dense.points[-1].step // 2)
        label = f"dense halfway: {middle.loss:.3f}"
        by_bytes.axhline(middle.loss, color="0.4", linestyle="--", linewidth=1, label=label)
        by_bytes.legend(handles=by_bytes.lines[-1:])
    for axes in (by_step, by_bytes):
        axes.grid(color="0.9")
    by_step.legend()
    figure.suptitle("Character LSTM on Tiny Shakespeare: the same steps, and the bytes they took")
    figure.savefig(path, dpi=150)
