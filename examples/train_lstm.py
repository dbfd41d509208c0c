"""Trains a character LSTM on Tiny Shakespeare: plain DDP and AdaComp, one after the other.

    torchrun --nproc-per-node=2 examples/train_lstm.py

All runs start from the same parameters, see the same batches and use the same learning rates: they
differ only in how the ranks exchange gradients. Ends with two tables, a picture and the curves as
CSV.
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass
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
from comparison import (
    TARGET_STEPS,
    Point,
    Run,
    print_equal_bytes,
    print_equal_steps,
    print_targets,
    write_csv,
    write_picture,
)
from torch import Tensor, nn
from torch.nn import functional

TEXT = Path(__file__).parent / "data" / "tinyshakespeare.txt"

# The defaults give all four LSTM matrices 500. The embedding and the output layer are small, and
# what they add to the bytes is little for what they do for the loss.
BIN_SIZES = {"embedding.weight": 50, "linear.weight": 50}

EARLY_STEPS = (0, 2, 5, 10, 20)  # validated too: as many bytes as compressed runs send in all


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", default=",".join(KINDS), help="some of dense,layer,bin")
    parser.add_argument("--steps", type=int, default=TARGET_STEPS)
    parser.add_argument("--batch", type=int, default=16, help="sequences per rank and step")
    parser.add_argument("--length", type=int, default=64, help="characters per sequence")
    parser.add_argument("--lr", type=float, default=4e-3, help="Adam's first learning rate")
    parser.add_argument("--evaluate-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument(
        "--out", type=Path, default=Path("demo"), help="folder of demo.png, demo.csv"
    )
    arguments = parser.parse_args(words)
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
    """Nats per character over the whole validation text, in windows that each start from a zero
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


def learning_rate_factor(step: int, steps: int) -> float:
    """From 1 straight down to 0.1, the same for all runs."""
    return 1 - 0.9 * step / steps


def train(kind: str, arguments: argparse.Namespace, text: Text, ranks: Ranks) -> Run:
    torch.manual_seed(arguments.seed)
    model = CharLSTM(text.vocabulary).to(ranks.device)
    ddp, state = wrap(model, kind, BIN_SIZES)
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


def print_plan(arguments: argparse.Namespace, text: Text, ranks: Ranks) -> None:
    names = "; ".join(DESCRIPTIONS[kind] for kind in arguments.runs)
    ranks.console.print(
        f"Character LSTM on {arguments.text.name}: {len(text.train):,} characters to train on, "
        f"{len(text.validation):,} to validate on, all of them every time, shared among the ranks."
        f"\n{ranks.world_size} rank(s) x {arguments.batch} sequences of {arguments.length} "
        f"characters, {arguments.steps:,} steps of Adam, learning rate {arguments.lr:g} falling "
        f"straight to {arguments.lr * learning_rate_factor(1, 1):g}, seed {arguments.seed}."
        f"\nOne run after the other, all from the same seed: {names}.",
        soft_wrap=True,
    )


def main() -> None:
    arguments = parse_arguments()
    with distributed(arguments.device) as ranks:
        missing = not arguments.text.is_file()
        ranks.require(
            f"--text: expected a text file, {arguments.text} is none" if missing else None
        )
        text = read_text(arguments.text)
        print_plan(arguments, text, ranks)
        runs: dict[str, Run] = {}
        for kind in arguments.runs:
            runs[kind] = train(kind, arguments, text, ranks)
            gc.collect()  # DDP objects are cycles; their buckets would stay for some time
        if ranks.rank == 0:
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_picture(runs, arguments.out / "demo.png")
            write_csv(runs, arguments.out / "demo.csv")
        bin_sizes = ", ".join(f"{name} {size}" for name, size in BIN_SIZES.items())
        bin_sizes += ", the LSTM's weights 500, its biases 50"
        print_equal_steps(runs, bin_sizes, ranks)
        if "dense" in runs and len(runs) > 1:
            print_equal_bytes(runs, ranks)
            print_targets(runs, ranks)
        ranks.console.print(f"wrote {arguments.out / 'demo.png'} and {arguments.out / 'demo.csv'}")


if __name__ == "__main__":
    main()
