"""Trains a small CNN on Fashion-MNIST with plain DDP or with AdaComp, at the default bin sizes.

    torchrun --nproc-per-node=2 examples/train_cnn.py --compress layer

The images come from Debian's package dataset-fashion-mnist or from --data. Every rank trains on its
own share of each epoch's shuffled images. Ends with test accuracy, bytes, ratio, step time.
"""

from __future__ import annotations

import argparse
import gzip
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
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

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
DEFAULT_LR = {"sgd": 0.02, "adam": 1e-3}
MOMENTUM = 0.9


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compress", choices=KINDS, default="layer")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, help="end after so many steps, if the epochs have more"
    )
    parser.add_argument("--batch", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, help="default: 0.02 for sgd, 0.001 for adam")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--data", type=Path, default=DEBIAN, help="folder of the four idx .gz files"
    )
    arguments = parser.parse_args(words)
    for name in ("epochs", "batch", "steps"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name}: expected at least 1, got {value}")
    if arguments.lr is None:
        arguments.lr = DEFAULT_LR[arguments.optimizer]
    return arguments


# ---- data, model ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    pixels: Tensor  # uint8 [count, 1, 28, 28]
    labels: Tensor  # int64 [count]


def missing_data(folder: Path) -> str | None:
    """One sentence if any of the files is not there."""
    for name in (name for pair in FILES.values() for name in pair):
        if not (folder / name).is_file():
            return (
                f"{folder / name} is not there: install Debian's package dataset-fashion-mnist, or "
                "give --data a folder with the four idx .gz files of Fashion-MNIST."
            )
    return None


def read_idx(path: Path) -> Tensor:
    """An idx file of bytes: two zero bytes, type 8 (uint8), dimensions, big-endian sizes, data."""
    content = bytearray(gzip.decompress(path.read_bytes()))
    if content[:3] != b"\0\0\x08":
        raise ValueError(
            f"{path}: expected an idx file of bytes (00 00 08), got {content[:3].hex(' ')}"
        )
    start = 4 + 4 * content[3]
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{path}: expected {shape} bytes of values, got {len(content) - start}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).view(shape)


def read_images(folder: Path, part: str, device: torch.device) -> Images:
    pixels, labels = (read_idx(folder / name).to(device) for name in FILES[part])
    return Images(pixels.unsqueeze(1), labels.long())


def to_inputs(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.286) / 0.353  # mean and deviation of the training images


def make_model() -> nn.Module:
    """Three 3x3 convolutions with batch norm, two fully connected layers: 356,458 parameters."""
    layers: list[nn.Module] = []
    for channels_in, channels_out in ((1, 32), (32, 64), (64, 64)):
        layers += [
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    head = [nn.Flatten(), nn.Linear(64 * 3 * 3, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers, *head)


def make_optimizer(model: nn.Module, arguments: argparse.Namespace) -> torch.optim.Optimizer:
    if arguments.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=arguments.lr)
    return torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=MOMENTUM)


# ---- training ------------------------------------------------------------------------------------


@torch.no_grad()
def test_accuracy(model: nn.Module, images: Images, ranks: Ranks) -> float:
    """Share of the test images named rightly. Every rank takes its part of them."""
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)  # batch norm's averages are each rank's own between two steps
    model.eval()
    pixels = images.pixels[ranks.rank :: ranks.world_size]
    labels = images.labels[ranks.rank :: ranks.world_size]
    right = 0
    for x, y in zip(pixels.split(500), labels.split(500), strict=True):
        right += int((cast(Tensor, model(to_inputs(x))).argmax(1) == y).sum())
    model.train()
    return ranks.sum(right)[0] / len(images.labels)


def epoch_batches(count: int, batch: int, ranks: Ranks, generator: torch.Generator) -> list[Tensor]:
    """This rank's batches of indices in one epoch. All ranks draw the same order and take their
    part of it; what does not fill a batch on every rank is left out."""
    order = torch.randperm(count, generator=generator)
    whole = count // (batch * ranks.world_size) * batch * ranks.world_size
    return list(order[:whole].view(-1, ranks.world_size, batch)[:, ranks.rank])


def train(arguments: argparse.Namespace, ranks: Ranks) -> None:
    training = read_images(arguments.data, "train", ranks.device)
    test = read_images(arguments.data, "test", ranks.device)
    torch.manual_seed(arguments.seed)
    model = make_model().to(ranks.device)
    ddp, state = wrap(model, arguments.compress)
    optimizer = make_optimizer(ddp, arguments)
    shuffler = torch.Generator().manual_seed(arguments.seed)
    count = len(training.labels)
    per_epoch = count // (arguments.batch * ranks.world_size)
    steps = min(arguments.epochs * per_epoch, arguments.steps or arguments.epochs * per_epoch)
    ranks.require(None if steps else f"--batch: expected at most {count} images on all ranks")
    seconds: list[float] = []
    with progress(ranks, arguments.compress, steps) as report:
        for step in range(steps):
            if step % per_epoch == 0:
                batches = epoch_batches(count, arguments.batch, ranks, shuffler)
            # A cosine down to 0 for every run alike: dense and compressed differ by the hook only.
            rate = arguments.lr * (1 + math.cos(math.pi * step / steps)) / 2
            optimizer.param_groups[0]["lr"] = rate
            indices = batches[step % per_epoch].to(ranks.device)
            began = ranks.now()
            optimizer.zero_grad()
            logits = ddp(to_inputs(training.pixels[indices]))
            functional.cross_entropy(logits, training.labels[indices]).backward()
            optimizer.step()
            seconds.append(ranks.now() - began)
            report(step + 1, "")
            if (step + 1) % per_epoch == 0 or step + 1 == steps:
                accuracy = test_accuracy(model, test, ranks)
                report(step + 1, f"test accuracy {accuracy:.1%}")
    check_agreement(model, ranks)
    print_result(
        arguments.compress, accuracy, model, bytes_sent(model, state, steps), seconds, ranks
    )


def print_result(
    kind: str, accuracy: float, model: nn.Module, sent: int, seconds: list[float], ranks: Ranks
) -> None:
    steps = len(seconds)
    dense = dense_bytes_per_step(model)
    table = Table(
        title=f"{DESCRIPTIONS[kind]}, {steps:,} steps",
        caption="Bytes one rank hands to the gradients' collectives, headers and all.",
    )
    for title in (
        "test accuracy",
        "sent per step",
        "dense",
        "compression ratio",
        "step time (median)",
    ):
        table.add_column(title, justify="right")
    table.add_row(
        f"{accuracy:.1%}",
        f"{sent / steps / 1e3:,.1f} kB",
        f"{dense / 1e3:,.1f} kB",
        f"{dense * steps / sent:.1f}x",
        f"{statistics.median(seconds) * 1e3:.1f} ms",
    )
    ranks.console.print(table)


def main() -> None:
    arguments = parse_arguments()
    with distributed(arguments.device) as ranks:
        ranks.require(missing_data(arguments.data))
        ranks.console.print(
            f"Fashion-MNIST, {ranks.world_size} rank(s) x {arguments.batch} images a step, "
            f"{arguments.optimizer}, learning rate {arguments.lr:g} falling to 0 in a half cosine; "
            f"gradients: {DESCRIPTIONS[arguments.compress]}.",
            soft_wrap=True,
        )
        train(arguments, ranks)


if __name__ == "__main__":
    main()
