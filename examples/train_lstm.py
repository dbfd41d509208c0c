"""Trains a character LSTM on Tiny Shakespeare: plain DDP and AdaComp, one after the other.

    torchrun --nproc-per-node=2 examples/train_lstm.py

All runs start from the same parameters, see the same batches and use the same learning rates, so they
differ only in how the ranks exchange gradients. Ends with two tables, a picture and the curves as CSV.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from common import (
    DESCRIPTIONS,
    KINDS,
    Ranks,
    bytes_sent,
    check_agreement,
    dense_bytes_per_step,
    distributed,
    progress,
    wrap,
)
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

TEXT = Path(__file__).parent / "data" / "tinyshakespeare.txt"

# What the project set out to reach, in 1,000 steps.
TARGET_STEPS = 1000
TARGET_ABOVE_DENSE = {"layer": 0.07, "bin": 0.05}
TARGET_RATIO = 100
TARGET_FEWER_BYTES = 50

EARLY_STEPS = (0, 2, 5, 10, 20)  # validated too: as many bytes as compressed runs send in all
COLOURS = {"dense": "#000000", "layer": "#0072B2", "bin": "#D55E00"}  # Okabe and Ito
MARKERS = {"dense": "o", "layer": "s", "bin": "^"}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", default=",".join(KINDS), help="some of dense,layer,bin")
    parser.add_argument("--steps", type=int, default=TARGET_STEPS)
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank and step")
    parser.add_argument("--length", type=int, default=64, help="characters per sequence")
    parser.add_argument("--lr", type=float, default=2e-3, help="Adam's peak learning rate")
    parser.add_argument("--evaluate-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of demo.png, demo.csv")
    arguments = parser.parse_args()
    arguments.runs = arguments.runs.split(",")
    if unknown := set(arguments.runs) - set(KINDS):
        parser.error(f"--runs: expected some of {','.join(KINDS)}, got {','.join(sorted(unknown))}")
    for name in ("steps", "batch", "length", "evaluate_every"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    return arguments


# ---- text, model, validation ---------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    train: Tensor  # int64 codes of the first 90 %
    validation: Tensor  # of the rest
    vocabulary: int


def read_text(path: Path) -> Text:
    text = path.read_text(encoding="utf-8")
    code = {character: i for i, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([code[character] for character in text])
    split = len(codes) * 9 // 10
    return Text(codes[:split], codes[split:], len(code))


class CharLSTM(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 128)
        self.lstm = nn.LSTM(128, 256, num_layers=2, batch_first=True)
        self.linear = nn.Linear(256, vocabulary)

    def forward(self, codes: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(codes))
        return cast(Tensor, self.linear(hidden))


def next_character_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def random_batch(codes: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """`batch` runs of length + 1 characters: inputs and, one further, targets."""
    starts = torch.randint(len(codes) - length, (batch, 1), generator=generator)
    return codes[starts + torch.arange(length + 1)]


@torch.no_grad()
def validation_loss(model: nn.Module, codes: Tensor, length: int, ranks: Ranks) -> float:
    """Nats per character over the whole validation text, cut into windows that each start from a zero
    state. Every rank takes its share of the windows; all get the same mean."""
    count = (len(codes) - 1) // length
    inputs = codes[: count * length].view(count, length)[ranks.rank :: ranks.world_size]
    targets = codes[1 : count * length + 1].view(count, length)[ranks.rank :: ranks.world_size]
    total = 0.0
    model.eval()
    for x, y in zip(inputs.split(128), targets.split(128), strict=True):
        loss = next_character_loss(model(x.to(ranks.device)), y.to(ranks.device), reduction="sum")
        total += loss.item()
    model.train()
    return ranks.sum(total)[0] / (count * length)


# ---- training ------------------------------------------------------------------------------------


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
    def ratio(self) -> float:
        """The same as stats()["compression_ratio"] at the end of the run."""
        return self.dense_bytes_per_step / self.bytes_per_step


def at_step(run: Run, step: int) -> Point:
    return next(point for point in run.points if point.step == step)


def learning_rate_factor(step: int, steps: int) -> float:
    """Half a cosine from 1 to 0.1, the same for all runs."""
    return 0.55 + 0.45 * math.cos(math.pi * step / steps)


def train(kind: str, arguments: argparse.Namespace, text: Text, ranks: Ranks) -> Run:
    torch.manual_seed(arguments.seed)
    model = CharLSTM(text.vocabulary).to(ranks.device)
    ddp, state = wrap(model, kind)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=arguments.lr)
    batches = torch.Generator().manual_seed(arguments.seed * 1000 + ranks.rank)
    steps = arguments.steps
    evaluated = {s for s in (*EARLY_STEPS, steps // 2, steps) if s <= steps}
    evaluated |= set(range(0, steps, arguments.evaluate_every))
    run = Run(kind, dense_bytes_per_step(model))
    with progress(ranks, f"{kind:<5}", steps) as report:
        for step in range(steps + 1):
            if step in evaluated:
                loss = validation_loss(model, text.validation, arguments.length, ranks)
                run.points.append(Point(step, bytes_sent(model, state, step), loss))
                sent = run.points[-1].bytes_sent / 1e6
                report(step, f"validation loss {loss:.3f}, {sent:,.2f} MB sent per rank")
            if step == steps:
                break
            data = random_batch(text.train, arguments.batch, arguments.length, batches)
            optimizer.param_groups[0]["lr"] = arguments.lr * learning_rate_factor(step, steps)
            began = ranks.now()
            data = data.to(ranks.device)
            optimizer.zero_grad()
            next_character_loss(ddp(data[:, :-1]), data[:, 1:]).backward()
            optimizer.step()
            run.seconds.append(ranks.now() - began)
            report(step + 1, "")
    check_agreement(model, ranks)
    return run


# ---- comparison ----------------------------------------------------------------------------------


def loss_at_bytes(run: Run, budget: float) -> float | None:
    """Validation loss after `budget` bytes, straight between two evaluations; None if never there."""
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


def print_equal_steps(runs: dict[str, Run], ranks: Ranks) -> None:
    steps = next(iter(runs.values())).points[-1].step
    table = Table(
        title=f"Equal steps: after {steps:,} steps",
        caption="Bytes that one rank hands to the gradients' collectives, every header counted; "
        "steady: second half of the run. kB = 1,000 bytes. Step time: median.",
    )
    table.add_column("run")
    for title in ("validation loss", "above dense", "sent per step", "steady", "compression ratio"):
        table.add_column(title, justify="right")
    table.add_column("steady", justify="right")
    table.add_column("step time", justify="right")
    for run in runs.values():
        against = f"{above(run, runs['dense']):+.1%}" if "dense" in runs else "-"
        table.add_row(
            DESCRIPTIONS[run.kind],
            f"{run.loss:.3f}",
            "-" if run.kind == "dense" else against,
            kilobytes(run.bytes_per_step),
            kilobytes(run.steady_bytes_per_step),
            f"{run.ratio:.0f}x",
            f"{run.dense_bytes_per_step / run.steady_bytes_per_step:.0f}x",
            f"{statistics.median(run.seconds) * 1e3:.0f} ms",
        )
    ranks.console.print(table)


def print_equal_bytes(runs: dict[str, Run], ranks: Ranks) -> None:
    dense = runs["dense"]
    middle = at_step(dense, dense.points[-1].step // 2)
    table = Table(
        title="Equal bytes",
        caption=f"Dense's loss halfway is {middle.loss:.3f}, after {middle.step:,} steps and "
        f"{megabytes(middle.bytes_sent)}. Dense's loss at other bytes is interpolated between two "
        "evaluations;\nthe others count the bytes until their first evaluation at or below dense's loss.",
    )
    table.add_column("run")
    for title in (
        "sent in all",
        "validation loss",
        "dense, same bytes",
        "to dense's halfway loss",
        "fewer bytes",
    ):
        table.add_column(title, justify="right")
    for run in (run for run in runs.values() if run is not dense):
        last = run.points[-1]
        same = loss_at_bytes(dense, last.bytes_sent)
        reached = first_at_loss(run, middle.loss)
        factor = fewer_bytes(run, dense)
        table.add_row(
            DESCRIPTIONS[run.kind],
            megabytes(last.bytes_sent),
            f"{last.loss:.3f}",
            "-" if same is None else f"{same:.3f}",
            megabytes(reached.bytes_sent) if reached else "not reached",
            "-" if factor is None else f"{factor:.0f}x",
        )
    ranks.console.print(table)


def print_targets(runs: dict[str, Run], ranks: Ranks) -> None:
    dense = runs["dense"]
    for run in (run for run in runs.values() if run is not dense):
        excess, limit = above(run, dense), TARGET_ABOVE_DENSE[run.kind]
        factor = fewer_bytes(run, dense)
        bytes_words = "never reached" if factor is None else f"reached with {factor:.0f}x fewer bytes"
        ranks.console.print(
            f"{run.kind}: validation loss {excess:+.1%} against dense, target at most {limit:+.0%}: "
            f"{verdict(excess <= limit)}.\n"
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
            "label": f"{run.kind}: {DESCRIPTIONS[run.kind]}",
        }
        losses = [point.loss for point in run.points]
        by_step.plot([point.step for point in run.points], losses, **style)
        by_bytes.plot([point.bytes_sent / 1e6 for point in run.points[1:]], losses[1:], **style)
    by_bytes.set_xscale("log")
    by_step.set_xlabel("training step")
    by_step.set_ylabel("validation loss (nats per character)")
    by_bytes.set_xlabel("gradient bytes sent per rank (MB, log scale)")
    if "dense" in runs:
        dense = runs["dense"]
        middle = at_step(dense, dense.points[-1].step // 2)
        by_bytes.axhline(middle.loss, color="0.5", linestyle="--", linewidth=1)
    for axes in (by_step, by_bytes):
        axes.grid(color="0.9")
    by_step.legend()
    figure.suptitle("Character LSTM on Tiny Shakespeare: same steps, far fewer bytes")
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = parse_arguments()
    with distributed(arguments.device) as ranks:
        missing = not arguments.text.is_file()
        ranks.require(f"--text: expected a text file, {arguments.text} is none" if missing else None)
        text = read_text(arguments.text)
        runs: dict[str, Run] = {}
        for kind in arguments.runs:
            runs[kind] = train(kind, arguments, text, ranks)
            gc.collect()  # DDP objects are cycles; their buckets would stay until the next collection
        if ranks.rank == 0:
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_picture(runs, arguments.out / "demo.png")
            write_csv(runs, arguments.out / "demo.csv")
        print_equal_steps(runs, ranks)
        if "dense" in runs and len(runs) > 1:
            print_equal_bytes(runs, ranks)
            print_targets(runs, ranks)
        ranks.console.print(f"wrote {arguments.out / 'demo.png'} and {arguments.out / 'demo.csv'}")


if __name__ == "__main__":
    main()
