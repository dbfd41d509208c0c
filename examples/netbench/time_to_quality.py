"""Seconds of training that each hook takes to dense training's final quality (as root).

    python examples/netbench/time_to_quality.py --models lstm --networks 100mbit 1gbit

Two kinds of cells, each two ranks in processes of their own: a *training* of one of the examples,
over a link without a limit, gives quality against steps; *times* are those of the same training's
first steps over each network. Parameters are the same bits at the same step on every network,
which is checked, so the two together are quality against seconds. A hook that misses dense's
quality in dense's steps is trained again for more, its learning rates stretched to them.

Each cell becomes a file in OUT/cells as soon as it is known; run again, it goes on where it was
stopped. Ends with a table, OUT/time_to_quality.csv, OUT/curves.csv and a figure for each model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import quality_report
from hooks import HOOKS
from network import Network, NetworkError, build_network, busy_cores, parse_link, unavailable
from quality_report import MODELS, Curve, Times
from rich.console import Console
from run import Workers, check_goodput, keep_logs
from worker import write_whole

WORKER = Path(__file__).with_name("quality_worker.py")
DENSE = "allreduce"
COMPARED = (DENSE, "fp16", "powersgd4", "layer", "bin")
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["lstm"])
    parser.add_argument("--networks", nargs="+", default=["100mbit", "1gbit"], metavar="RATE")
    trainable = [name for name in HOOKS if name != "noop"]
    parser.add_argument("--hooks", nargs="+", choices=trainable, default=list(COMPARED))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--steps", type=int, default=1000, help="of dense training")
    parser.add_argument(
        "--stretch",
        nargs="+",
        type=float,
        default=[1.0, 2.0, 3.0],
        help="lengths in units of --steps, tried in this order until dense's quality is reached",
    )
    parser.add_argument("--evaluate-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--timed-steps", type=int, default=100, help="a multiple of the above")
    parser.add_argument("--repeats", type=int, default=1, help="of the times")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds per cell")
    parser.add_argument("--retry", action="store_true", help="run failed cells again")
    parser.add_argument("--data", type=Path, default=FASHION_MNIST, help="the CNN's images")
    parser.add_argument("--out", type=Path, default=Path("netbench"))
    args = parser.parse_args(words)
    for name in ("steps", "evaluate_every", "timed_steps", "repeats", "timeout"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')}: expected more than 0")
    if args.stretch[0] != 1 or sorted(args.stretch) != args.stretch:
        parser.error(f"--stretch: expected 1 and then rising numbers, got {args.stretch}")
    if args.timed_steps % args.evaluate_every or args.timed_steps > args.steps:
        parser.error(
            f"--timed-steps: expected a multiple of --evaluate-every {args.evaluate_every} up to "
            f"--steps {args.steps}, got {args.timed_steps}"
        )
    if DENSE not in args.hooks:
        parser.error(f"--hooks: expected {DENSE} among them, whose quality is the aim")
    try:
        args.links = {text: parse_link(text) for text in (*args.networks, "unlimited")}
    except ValueError as error:
        parser.error(str(error))
    return args


# ---- cells ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What identifies a cell. `stop` = `length` and `every` > 0: a training, else times."""

    model: str
    network: str
    hook: str
    seed: int
    length: int  # steps of the learning rate's schedule
    stop: int  # steps that are run
    every: int  # steps between evaluations, 0: none
    repeat: int = 0

    @property
    def name(self) -> str:
        return "-".join(map(str, asdict(self).values()))


@dataclass
class Result:
    """Points are rank 0's, bytes those that left its host; seconds are the slowest rank's."""

    cell: Cell
    status: str = "ok"  # ok, failed, hang
    reason: str = ""
    busy_cores: float = 0.0  # at work for others, just before
    points: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def digest(self, step: int) -> str:
        return next(str(point["digest"]) for point in self.points if point["step"] == step)


def run_cell(network: Network, cell: Cell, args: argparse.Namespace) -> Result:
    result = Result(cell, busy_cores=busy_cores())
    options = {**asdict(cell), "data": args.data, "timeout": args.timeout}
    del options["network"], options["repeat"]
    with tempfile.TemporaryDirectory(prefix="netbench") as name:
        workers = Workers(Path(name))
        try:
            workers.launch(network, WORKER, options)
            result.status, result.reason = workers.wait(args.timeout)
        finally:
            workers.end()
        if result.status != "ok":
            keep_logs(workers, args.out / "logs" / cell.name)
            return result
        ranks = workers.results()
    result.points = ranks[0]["points"]
    result.seconds = [max(times) for times in zip(*(r["seconds"] for r in ranks), strict=True)]
    return result


class Cells:
    """Runs cells, or reads them back if they have run before. One network stands at a time."""

    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args, self.console = args, console
        self.folder: Path = args.out / "cells"
        self.folder.mkdir(parents=True, exist_ok=True)

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.name}.json"

    def read(self, cell: Cell) -> Result | None:
        path = self._path(cell)
        if not path.exists():
            return None
        content = json.loads(path.read_text())
        result = Result(**{**content, "cell": Cell(**content["cell"])})
        return None if result.status != "ok" and self.args.retry else result

    def get(self, cells: list[Cell]) -> list[Result]:
        """Results of cells on the same network, in order."""
        found = {cell: self.read(cell) for cell in cells}
        if None not in found.values():
            return [result for result in found.values() if result]
        with build_network(self.args.links[cells[0].network], 2) as network:
            check_goodput(network, self.console)
            return [result or self._run(network, cell) for cell, result in found.items()]

    def _run(self, network: Network, cell: Cell) -> Result:
        result = run_cell(network, cell, self.args)
        write_whole(self._path(cell), json.dumps(asdict(result)))
        words = result.reason or f"{sum(result.seconds):,.1f} s of training steps"
        kind = "training" if cell.every else "times"
        case = f"{cell.model} {cell.network} {cell.hook}, seed {cell.seed}"
        self.console.print(
            f"{kind} {case}, {cell.stop} of {cell.length} steps: {result.status}, {words}, "
            f"{result.busy_cores:.1f} cores were busy",
            soft_wrap=True,
            markup=False,
        )
        return result


# ---- the grid ------------------------------------------------------------------------------------


def training(args: argparse.Namespace, model: str, hook: str, seed: int, length: int) -> Cell:
    return Cell(model, "unlimited", hook, seed, length, length, args.evaluate_every)


def train_all(args: argparse.Namespace, cells: Cells) -> list[Result]:
    """All trainings: length by length, only for hooks that have not reached dense's quality."""
    results: list[Result] = []
    for model in args.models:
        for seed in args.seeds:
            [dense] = cells.get([training(args, model, DENSE, seed, args.steps)])
            results.append(dense)
            waiting = [hook for hook in args.hooks if hook != DENSE and dense.status == "ok"]
            for stretch in args.stretch:
                length = int(args.steps * stretch)
                wanted = [training(args, model, hook, seed, length) for hook in waiting]
                new = cells.get(wanted)
                results += new
                waiting = [
                    result.cell.hook
                    for result in new
                    if result.status == "ok"
                    and not quality_report.reaches(model, result.points, dense.points)
                ]
    return results


def time_all(args: argparse.Namespace, cells: Cells) -> list[Result]:
    """Times of every hook on every network; repeats are outermost, so that a machine that slows
    down does so for every hook."""
    results: list[Result] = []
    for repeat in range(args.repeats):
        for network in args.networks:
            wanted = [
                Cell(model, network, hook, seed, args.steps, args.timed_steps, 0, repeat)
                for model in args.models
                for seed in args.seeds[:1]
                for hook in args.hooks
            ]
            results += cells.get(wanted)
    return results


def check_same_training(times: Result, trainings: list[Result]) -> None:
    """Raises ValueError unless the timed steps led to the training's own parameters."""
    timed = times.cell
    for result in trainings:
        one = result.cell
        same = (one.model, one.hook, one.seed, one.length)
        if result.status == "ok" and same == (timed.model, timed.hook, timed.seed, timed.length):
            expected, got = result.digest(timed.stop), times.digest(timed.stop)
            if expected != got:
                raise ValueError(
                    f"{timed.name}: expected parameters {expected} after {timed.stop} steps, as in "
                    f"the training over {one.network}, got {got}"
                )


def curves(trainings: list[Result]) -> list[Curve]:
    return [
        Curve(
            result.cell.model,
            result.cell.hook,
            result.cell.seed,
            result.cell.length,
            [(p["step"], p["wire_bytes"], p["quality"]) for p in result.points],
        )
        for result in trainings
        if result.status == "ok"
    ]


def times(timed: list[Result]) -> dict[tuple[str, str, str], Times]:
    """(model, network, hook) -> times over all repeats."""
    groups: dict[tuple[str, str, str], list[list[float]]] = {}
    for result in timed:
        if result.status == "ok":
            key = (result.cell.model, result.cell.network, result.cell.hook)
            groups.setdefault(key, []).append(result.seconds)
    return {key: Times.of(repeats) for key, repeats in groups.items()}


def main(words: list[str] | None = None) -> None:
    args = parse_arguments(words)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    problem = unavailable()
    if "cnn" in args.models and not any(args.data.glob("*.gz")):
        problem = f"{args.data}: no images: install dataset-fashion-mnist, or give --data"
    if problem:
        sys.exit(f"error: {problem}")
    cells = Cells(args, console)
    try:
        trainings = train_all(args, cells)
        timed = time_all(args, cells)
        for result in timed:
            if result.status == "ok":
                check_same_training(result, trainings)
    except (NetworkError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"stopped: cells so far are in {cells.folder}; run the same command to go on")
    quality_report.write(curves(trainings), times(timed), args.out, console)
    failed = [result for result in trainings + timed if result.status != "ok"]
    for result in failed:
        console.print(f"{result.cell.name} {result.status}: {result.reason}", markup=False)
    busy = max(result.busy_cores for result in timed)
    console.print(f"cores busy with other work before the timed cells: up to {busy:.1f}")


if __name__ == "__main__":
    main()
