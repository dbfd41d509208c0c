"""What all studies share: settings, one training run, the CSV that a study resumes from.

A study is a list of `Setting`s. Every setting is one training run whose rows are appended to the
study's CSV when it ends, so a study that is stopped goes on with the first setting that is not
there yet. The figure and the finding are made from the CSV alone.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import torch
from exchanges import ClipFirst, Half, LocalMomentum, PowerSGD, TopK, WarmUp
from learners import AdaComp, Dense, Exchange, Learners
from tasks import CIFAR_HELP, Task, loss_of, make_task
from torch import Tensor, nn
from tqdm import tqdm
from train_cnn import DEBIAN

from adacomp_torch import default_bin_size
from adacomp_torch.layout import BinSizeOption

matplotlib.use("Agg")

MOMENTUM = 0.9
DIVERGED = 1e3  # nats; guessing has log(10) or log(65)


@dataclass(frozen=True)
class Setting:
    """One training run. Strings and numbers only: this is what a CSV row is known by."""

    task: str
    method: str = "adacomp"  # or dense, topk, powersgd, half
    learners: int = 4
    batch: int = 16  # per learner
    steps: int = 4000
    optimizer: str = "sgd"  # with momentum 0.9; or plain (none), adam, adamw
    lr: float = 0.02  # the first one; a cosine takes it to 0
    seed: int = 1  # of parameters and batches
    scale: str = "layer"
    bins: str = "default"  # or an int; or PATTERN=INT,..., 0 for raw
    factor: float = 2.0
    amount: int = 0  # topk: bytes per step; powersgd: rank
    warm_up: int = 0  # dense steps first
    clip: float = 0.0  # largest norm of the gradient; 0: any
    clip_where: str = "after"  # the exchange; or before
    weight_decay: float = 0.0
    beta2: float = 0.999
    momentum_where: str = "optimizer"  # or learner: before the exchange


Row = dict[str, str]
KEY = [field.name for field in fields(Setting)]
# step: so many are done. Losses in nats; train_loss, bytes and entries_per_bin are means over the
# steps since the row before. needed_bytes: a learner's payload with nothing to spare; sent_bytes:
# what the hook's rule for capacities gives to the collective. Residuals: percentiles of |residual|
# over all learners, gradient_rms of the last mean gradient. diverged: 1 if the run was ended.
MEASURED = ["step", "train_loss", "test_loss", "test_error", "needed_bytes", "sent_bytes",
            "dense_bytes", "entries_per_bin", "residual_p50", "residual_p99", "residual_max",
            "gradient_rms", "diverged", "seconds"]  # fmt: skip


def bin_size_option(bins: str) -> BinSizeOption:
    """Translates `Setting.bins` into the option `bin_size`."""
    if bins == "default":
        return default_bin_size
    if "=" not in bins:
        return int(bins)
    pairs = (pair.split("=") for pair in bins.split(","))
    return {pattern: int(size) or None for pattern, size in pairs}


def make_exchange(setting: Setting, model: nn.Module) -> tuple[Exchange, AdaComp | None]:
    """The setting's exchange, and the AdaComp in it if there is one."""
    learners = setting.learners
    numel = sum(p.numel() for p in model.parameters())
    adacomp = None
    exchange: Exchange
    if setting.method == "adacomp":
        exchange = adacomp = AdaComp(
            model,
            learners,
            bin_size=bin_size_option(setting.bins),
            scale="bin" if setting.scale == "bin" else "layer",
            threshold_factor=setting.factor,
        )
    elif setting.method == "topk":
        exchange = TopK(learners, numel, setting.amount)
    elif setting.method == "powersgd":
        exchange = PowerSGD(model, learners, setting.amount)
    elif setting.method == "half":
        exchange = Half(learners, numel)
    else:
        exchange = Dense(learners, numel)
    if setting.warm_up > 0:
        exchange = WarmUp(exchange, learners, numel, setting.warm_up)
    if setting.momentum_where == "learner":
        exchange = LocalMomentum(exchange, learners, numel, MOMENTUM)
    if setting.clip > 0 and setting.clip_where == "before":
        exchange = ClipFirst(exchange, setting.clip)
    return exchange, adacomp


def make_optimizer(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": setting.lr, "weight_decay": setting.weight_decay}
    if setting.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if setting.optimizer == "adam" else torch.optim.AdamW
        return kind(model.parameters(), betas=(0.9, setting.beta2), **common)
    plain = setting.optimizer == "plain" or setting.momentum_where == "learner"
    return torch.optim.SGD(model.parameters(), momentum=0.0 if plain else MOMENTUM, **common)


class Run:
    """One setting's training; `rows` are filled by `train`."""

    def __init__(self, setting: Setting, task: Task) -> None:
        torch.manual_seed(setting.seed)
        self.setting = setting
        self.task = task
        self.model = task.make_model()
        self.exchange, self.adacomp = make_exchange(setting, self.model)
        self.learners = Learners(self.model, setting.learners, self.exchange)
        self.optimizer = make_optimizer(setting, self.model)
        self.rows: list[dict[str, object]] = []
        self._began = time.perf_counter()
        self._start_period(0)

    def _start_period(self, step: int) -> None:
        self._first_step, self._loss, self._needed, self._sent = step, 0.0, 0.0, 0.0
        self._entries_before = self._entries()

    def _entries(self) -> int:
        return 0 if self.adacomp is None else int(self.adacomp.counters[:, :, 0].sum())

    def train(self, evaluations: int, at_row: Callable[[Run, int], None], tick: tqdm) -> None:
        """Evaluates so often, evenly and at the end; then calls `at_row(self, steps done)`."""
        setting = self.setting
        batches = torch.Generator().manual_seed(setting.seed)
        every = max(1, setting.steps // evaluations)
        for step in range(setting.steps):
            rate = setting.lr * (1 + math.cos(math.pi * step / setting.steps)) / 2
            self.optimizer.param_groups[0]["lr"] = rate
            loss = self._step(batches)
            tick.update()
            done = step + 1
            diverged = not loss < DIVERGED
            if diverged or done % every == 0 or done == setting.steps:
                self._add_row(done, diverged)
                at_row(self, done)
            if diverged:
                tick.update(setting.steps - done)
                return

    def _step(self, batches: torch.Generator) -> float:
        setting = self.setting
        x, y = self.task.sample(setting.batch * setting.learners, batches)
        parts = list(zip(x.split(setting.batch), y.split(setting.batch), strict=True))
        loss = self.learners.backward(partial(_loss_on, self.model, parts))
        if setting.clip > 0 and setting.clip_where == "after":
            nn.utils.clip_grad_norm_(self.model.parameters(), setting.clip)
        self.optimizer.step()
        self._loss += loss
        self._sent += self.exchange.sent_bytes
        # The dense steps of a warm-up write no payload.
        compressed = self.adacomp is not None and self.adacomp.step > 0
        self._needed += (
            self.adacomp.needed_bytes
            if self.adacomp is not None and compressed
            else self.exchange.sent_bytes
        )
        return loss

    def _add_row(self, done: int, diverged: bool) -> None:
        steps = done - self._first_step
        loss, error = self.task.evaluate(self.model)
        row = {
            "step": done,
            "train_loss": self._loss / steps,
            "test_loss": loss,
            "test_error": error,
            "needed_bytes": self._needed / steps,
            "sent_bytes": self._sent / steps,
            "dense_bytes": 4 * self.learners.mean.numel(),
            **self._of_residuals(steps),
            "gradient_rms": float(self.learners.mean.square().mean().sqrt()),
            "diverged": int(diverged),
            "seconds": time.perf_counter() - self._began,
        }
        self.rows.append({**asdict(self.setting), **row})
        self._start_period(done)

    def _of_residuals(self, steps: int) -> dict[str, float]:
        if self.adacomp is None:
            return {}
        sizes = zip(self.adacomp.numels, self.adacomp.bin_sizes, strict=True)
        bins = sum(-(-numel // size) for numel, size in sizes if size)
        entries = self._entries() - self._entries_before
        values = self.adacomp.residuals.abs().flatten()
        sample = values[:: max(1, len(values) // 1_000_000)]
        ordered = sample.sort().values
        return {
            "entries_per_bin": entries / (bins * steps * self.setting.learners),
            "residual_p50": float(ordered[len(ordered) // 2]),
            "residual_p99": float(ordered[len(ordered) * 99 // 100]),
            "residual_max": float(values.max()),
        }


def _loss_on(model: nn.Module, parts: Sequence[tuple[Tensor, Tensor]], learner: int) -> Tensor:
    x, y = parts[learner]
    return loss_of(model(x), y)


# ---- CSV -----------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    """All rows, as strings; none if there is no such file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def append_rows(path: Path, columns: Sequence[str], rows: Iterable[dict[str, object]]) -> None:
    """In one write, so that a run that is killed leaves a setting's rows whole or not at all."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        writer.writeheader()
    for row in rows:
        writer.writerow({k: _rounded(v) for k, v in row.items()})
    with path.open("ab", buffering=0) as file:
        file.write(text.getvalue().encode())


def _rounded(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def key_of(setting: Setting) -> tuple[str, ...]:
    return tuple(str(_rounded(value)) for value in asdict(setting).values())


def key_of_row(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


# ---- a study -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Study:
    """`settings` come in order of value: a run that is stopped early has the most telling ones.

    `draw(rows, path)` writes the figure, `finding(rows)` is one sentence; both get the rows of this
    study's settings only. `at_row(run, steps_done)` may measure more, into another CSV.
    """

    name: str
    settings: Callable[[int], list[Setting]]  # of the first seed
    draw: Callable[[list[Row], Path], None]
    finding: Callable[[list[Row]], str]
    evaluations: int = 8
    at_row: Callable[[Run, int, Path], None] | None = None


def parse_arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description,
        epilog=CIFAR_HELP + ". Fashion-MNIST: Debian's package dataset-fashion-mnist or --fashion.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="the first one, if there are several")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all numbers of steps")
    parser.add_argument("--limit", type=int, help="train at most so many settings, then draw")
    parser.add_argument("--data", type=Path, help="CIFAR-10: see below")
    parser.add_argument("--fashion", type=Path, default=DEBIAN, help="folder of the idx .gz files")
    parser.add_argument("--out", type=Path, default=Path("studies"), help="of CSV and figure")
    arguments = parser.parse_args()
    if not 0 < arguments.scale < math.inf:
        parser.error(f"--scale: expected a number above 0, got {arguments.scale}")
    return arguments


def main(study: Study, description: str | None) -> None:
    """Trains what is not in the CSV yet; draws; says what was found."""
    arguments = parse_arguments(description)
    csv_path = arguments.out / f"{study.name}.csv"
    settings = [
        replace(s, steps=max(2, round(s.steps * arguments.scale)))
        for s in study.settings(arguments.seed)
    ]
    done = {key_of_row(row) for row in read_rows(csv_path)}
    todo = [s for s in settings if key_of(s) not in done][: arguments.limit]
    print(f"{study.name}: {len(settings)} settings, {len(todo)} to train now", flush=True)
    total = sum(s.steps for s in todo)
    with tqdm(total=total, unit="step", mininterval=1.0, maxinterval=60.0) as tick:
        for setting in todo:
            label = " ".join(str(v) for v in list(asdict(setting).values())[:11])
            tick.set_description(f"{setting.method} {setting.scale} {setting.bins}")
            run = Run(setting, make_task(setting.task, arguments.data, arguments.fashion))

            def at_row(run: Run, step: int) -> None:
                if study.at_row is not None:
                    study.at_row(run, step, arguments.out)

            run.train(study.evaluations, at_row, tick)
            append_rows(csv_path, [*KEY, *MEASURED], run.rows)
            last = run.rows[-1]
            tick.write(f"{label}: error {last['test_error']:.4f} loss {last['test_loss']:.4f}")
    wanted = {key_of(s) for s in settings}
    rows = [row for row in read_rows(csv_path) if key_of_row(row) in wanted]
    if rows:
        figure = arguments.out / f"{study.name}.png"
        study.draw(rows, figure)
        sentence = study.finding(rows)
        csv_path.with_suffix(".txt").write_text(sentence + "\n", encoding="utf-8")
        print(f"wrote {csv_path}, .txt and {figure}\n{sentence}")
