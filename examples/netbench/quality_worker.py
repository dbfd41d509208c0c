"""One rank of one training; started by time_to_quality.py on its host. Writes one JSON object.

Trains one of the examples' models on their data, with their options, batches and learning rates,
under one of the hooks. Only zero_grad, forward, backward with its exchange and optimizer.step are
timed: neither drawing the batch nor evaluating.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import math
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import train_cnn
import train_lstm
from common import Ranks, check_agreement
from hooks import HOOKS, Hook, adacomp
from network import interface_bytes
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from worker import die_with_parent, join, write_whole

from adacomp_torch import default_bin_size
from adacomp_torch.layout import BinSizeOption

Batch = tuple[Tensor, Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", required=True, help="address:port of rank 0")
    parser.add_argument("--model", choices=TRAININGS, required=True)
    parser.add_argument("--hook", choices=HOOKS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="steps of the schedule")
    parser.add_argument("--stop", type=int, required=True, help="train for so many of them")
    parser.add_argument("--every", type=int, required=True, help="evaluate so often; 0: never")
    parser.add_argument("--timeout", type=float, required=True, help="of a collective, seconds")
    parser.add_argument("--data", type=Path, required=True, help="Fashion-MNIST's folder")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the starter")
    return parser.parse_args()


# ---- the examples' trainings ---------------------------------------------------------------------


class Training(Protocol):
    """A model, its optimizer and its data, all set by the seed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    bin_size: BinSizeOption

    def rate(self, step: int, length: int) -> float: ...

    def batch(self, step: int) -> Batch: ...

    def loss(self, ddp: nn.Module, batch: Batch) -> Tensor: ...

    def quality(self) -> float: ...


class LstmTraining:
    """examples/train_lstm.py with its defaults; quality is the validation loss."""

    bin_size: BinSizeOption = train_lstm.BIN_SIZES

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        self.ranks, self.options = ranks, train_lstm.parse_arguments([])
        self.text = train_lstm.read_text(self.options.text)
        torch.manual_seed(args.seed)
        self.model: nn.Module = train_lstm.CharLSTM(self.text.vocabulary)
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
            self.model.parameters(), lr=self.options.lr
        )
        self.generator = torch.Generator().manual_seed(args.seed * 1000 + ranks.rank)

    def rate(self, step: int, length: int) -> float:
        return float(self.options.lr * train_lstm.learning_rate_factor(step, length))

    def batch(self, step: int) -> Batch:
        size = (self.options.batch, self.options.length)
        data = train_lstm.random_batch(self.text.train, *size, self.generator)
        return data[:, :-1], data[:, 1:]

    def loss(self, ddp: nn.Module, batch: Batch) -> Tensor:
        return train_lstm.next_character_loss(ddp(batch[0]), batch[1])

    def quality(self) -> float:
        length = self.options.length
        return train_lstm.validation_loss(self.model, self.text.validation, length, self.ranks)


class CnnTraining:
    """examples/train_cnn.py with its defaults; quality is the test accuracy."""

    bin_size: BinSizeOption = staticmethod(default_bin_size)

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        self.ranks, self.options = ranks, train_cnn.parse_arguments([])
        self.train = train_cnn.read_images(args.data, "train", ranks.device)
        self.test = train_cnn.read_images(args.data, "test", ranks.device)
        torch.manual_seed(args.seed)
        self.model = train_cnn.make_model()
        self.optimizer = train_cnn.make_optimizer(self.model, self.options)
        self.shuffler = torch.Generator().manual_seed(args.seed)
        self.epoch: list[Tensor] = []

    def rate(self, step: int, length: int) -> float:
        return float(self.options.lr * (1 + math.cos(math.pi * step / length)) / 2)

    def batch(self, step: int) -> Batch:
        if not self.epoch:
            size = (len(self.train.labels), self.options.batch)
            self.epoch = train_cnn.epoch_batches(*size, self.ranks, self.shuffler)[::-1]
        indices = self.epoch.pop()
        return self.train.pixels[indices], self.train.labels[indices]

    def loss(self, ddp: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(ddp(train_cnn.to_inputs(batch[0])), batch[1])

    def quality(self) -> float:
        return train_cnn.test_accuracy(self.model, self.test, self.ranks)


TRAININGS: dict[str, type[LstmTraining] | type[CnnTraining]] = {
    "lstm": LstmTraining,
    "cnn": CnnTraining,
}


# ---- one rank ------------------------------------------------------------------------------------


def chosen_hook(name: str, training: Training) -> Hook:
    """AdaComp with the example's bin sizes, the others as they are."""
    if name in ("layer", "bin"):
        return replace(HOOKS[name], register=adacomp(name, training.bin_size))
    return HOOKS[name]


def digest(model: nn.Module) -> str:
    """Of the parameters' bits: two trainings with the same digest are at the same point."""
    bits = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).view(torch.uint8)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]


def train(training: Training, args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    ddp, _ = chosen_hook(args.hook, training).wrap(training.model)
    points: list[dict[str, Any]] = []
    seconds: list[float] = []
    sent, before = 0, interface_bytes()
    for step in range(args.stop + 1):
        if step == args.stop or (args.every and step % args.every == 0):
            # After a barrier, which is a few hundred bytes: until then a rank may still send.
            dist.barrier()
            sent += interface_bytes() - before
            point = {"step": step, "wire_bytes": sent, "digest": digest(training.model)}
            points.append(point | ({"quality": training.quality()} if args.every else {}))
            dist.barrier()
            before = interface_bytes()
        if step == args.stop:
            break
        batch = training.batch(step)
        training.optimizer.param_groups[0]["lr"] = training.rate(step, args.length)
        began = time.perf_counter()
        training.optimizer.zero_grad()
        training.loss(ddp, batch).backward()
        training.optimizer.step()
        seconds.append(time.perf_counter() - began)
    check_agreement(training.model, ranks)
    return {"points": points, "seconds": seconds}


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the starter asks a rank that hangs
    args = parse_arguments()
    die_with_parent(args.parent)
    torch.set_num_threads(1)
    store = join(args)  # noqa: F841  (rank 0's store must live to the end)
    ranks = Ranks(args.rank, args.ranks, torch.device("cpu"), Console(quiet=True))
    result = train(TRAININGS[args.model](args, ranks), args, ranks)
    write_whole(args.result, json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
