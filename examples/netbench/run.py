"""Step times of data-parallel training on hosts with slow links, built on this machine (as root).

    python examples/netbench/run.py --models mlp --networks 100mbit 1gbit --ranks 2 --repeats 3

Every case (model, network, ranks, hook) runs in processes of its own and becomes a row of
OUT/netbench.csv; one that fails or hangs becomes a row that says why. Run again, it goes on where
it was stopped. `plot.py OUT/netbench.csv` draws the figure.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import results
from hooks import HOOKS
from network import (
    MAX_HOSTS,
    Network,
    NetworkError,
    address,
    build_network,
    busy_cores,
    parse_link,
    unavailable,
)
from results import Row
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from workloads import WORKLOADS, missing

WORKER = Path(__file__).with_name("worker.py")
EXAMPLES = str(Path(__file__).parent.parent)  # whose train scripts a worker may import
STORE_PORT = 29500  # every case's namespace is empty, so the port is free
GRACE_SECONDS = 2.0  # for stacks to be written, or for the others to see a failure
TOO_SLOW, TOO_FAST = 0.85, 1.02  # goodput / rate; headers take 4 to 5 %


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=["mlp"])
    networks = ["100mbit", "1gbit", "10gbit", "unlimited"]
    parser.add_argument("--networks", nargs="+", default=networks, metavar="RATE")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--hooks", nargs="+", choices=HOOKS, default=list(HOOKS))
    parser.add_argument("--repeats", type=int, default=1, help="of the whole grid, in turn")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timed steps per case")
    parser.add_argument("--min-steps", type=int, default=5)
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--warm-up", type=int, help="steps; the default depends on the hook")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds per case")
    parser.add_argument("--retry", action="store_true", help="measure failed cases again")
    parser.add_argument("--out", type=Path, default=Path("netbench"))
    args = parser.parse_args(arguments)
    for name in ("repeats", "min_steps", "max_steps", "seconds", "timeout", "warm_up"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')}: expected more than 0, got {value}")
    if args.max_steps < args.min_steps:
        parser.error(f"--max-steps: expected at least {args.min_steps}, got {args.max_steps}")
    for count in args.ranks:
        if not 2 <= count <= MAX_HOSTS:
            parser.error(f"--ranks: expected 2 to {MAX_HOSTS}, got {count}")
    try:
        args.links = [parse_link(text) for text in args.networks]
    except ValueError as error:
        parser.error(str(error))
    return args


# ---- one case ------------------------------------------------------------------------------------


@dataclass
class Workers:
    """The processes of one case; their output is kept in `folder`."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, network: Network, row: Row, args: argparse.Namespace) -> None:
        options = {
            "model": row.model,
            "hook": row.hook,
            "warm-up": args.warm_up or HOOKS[row.hook].warm_up,
            "seconds": args.seconds,
            "min-steps": args.min_steps,
            "max-steps": args.max_steps,
            "timeout": args.timeout,
        }
        self.launch(network, WORKER, options)

    def launch(self, network: Network, script: Path, options: dict[str, object]) -> None:
        """Starts `script` on every host, with `options` and those that differ between ranks."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        paths = (EXAMPLES, os.environ.get("PYTHONPATH"))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        for rank in range(network.hosts):
            every = {
                "rank": rank,
                "ranks": network.hosts,
                "store": f"{address(0)}:{STORE_PORT}",
                "result": self.folder / f"rank{rank}.json",
                "parent": os.getpid(),
                **options,
            }
            words = itertools.chain(*((f"--{name}", str(value)) for name, value in every.items()))
            with (self.folder / f"rank{rank}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(
                        network.command(rank, sys.executable, str(script), *words),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,  # Ctrl-C reaches run.py, which ends them
                    )
                )

    def wait(self, seconds: float) -> tuple[str, str]:
        """Status and reason, when all have ended, one has failed, or the time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            codes = [process.poll() for process in self.processes]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                time.sleep(0.2)  # the last lines of the log
                code = codes[failed[0]]
                return "failed", f"rank {failed[0]}, exit code {code}: {self._last_line(failed[0])}"
            if None not in codes:
                return "ok", ""
            time.sleep(0.02)
        running = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        for rank in running:
            self.processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(GRACE_SECONDS)
        return (
            "hang",
            f"no end within {seconds:g} s; running: ranks {running}{self._where(running)}",
        )

    def _log(self, rank: int) -> str:
        return (self.folder / f"rank{rank}.log").read_text(errors="replace")

    def _last_line(self, rank: int) -> str:
        """The exception's line: the last that looks like one, else the last."""
        lines = [line for line in self._log(rank).splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
        return (errors or lines or ["no output"])[-1][:300]

    def _where(self, ranks: list[int]) -> str:
        """Innermost Python frame of the first rank's main thread, from its stacks."""
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', self._log(ranks[0]))
        names = [f"{name} ({Path(file).name}:{line})" for file, line, name in frames]
        return f"; rank {ranks[0]} in {names[0]}" if names else ""

    def results(self) -> list[dict[str, Any]]:
        """What the ranks have written, after they all ended well."""
        paths = (self.folder / f"rank{rank}.json" for rank in range(len(self.processes)))
        return [json.loads(path.read_text()) for path in paths]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def summarise(row: Row, ranks: list[dict[str, Any]]) -> Row:
    """The row of the case from what its ranks have written."""
    slowest = [1e3 * max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    tenths = statistics.quantiles(slowest, n=10, method="inclusive")

    def mean(name: str) -> float:
        return statistics.fmean(rank.get(name, 0.0) for rank in ranks)

    return replace(
        row,
        status="ok",
        step_ms=statistics.median(slowest),
        step_ms_p10=tenths[0],
        step_ms_p90=tenths[-1],
        steps=len(slowest),
        cpu_ms=1e3 * mean("cpu_seconds"),
        wire_bytes=mean("wire_bytes"),
        compress_ms=1e3 * mean("compress_seconds"),
        exchange_ms=1e3 * mean("exchange_seconds"),
        decompress_ms=1e3 * mean("decompress_seconds"),
    )


def measure(network: Network, row: Row, args: argparse.Namespace) -> Row:
    """Runs the case `row.key`; a failure or a hang is a row too."""
    row = replace(row, busy_cores=busy_cores())
    with tempfile.TemporaryDirectory(prefix="netbench") as name:
        workers = Workers(Path(name))
        try:
            workers.start(network, row, args)
            status, reason = workers.wait(args.timeout)
        finally:
            workers.end()
        if status != "ok":
            keep_logs(workers, args.out / "logs" / "-".join(map(str, row.key)))
            return replace(row, status=status, reason=reason)
        return summarise(row, workers.results())


def keep_logs(workers: Workers, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for log in workers.folder.glob("*.log"):
        (folder / log.name).write_bytes(log.read_bytes())


# ---- the grid ------------------------------------------------------------------------------------


def pending(args: argparse.Namespace, done: list[Row]) -> dict[tuple[int, str, int], list[Row]]:
    """(repeat, network, ranks) -> rows to measure there, in order. Repeats are outermost, so that
    a machine that slows down does so for every hook."""
    have = {row.key for row in done if row.status == "ok" or not args.retry}
    groups: dict[tuple[int, str, int], list[Row]] = {}
    grid = itertools.product(
        range(args.repeats), args.networks, args.ranks, args.models, args.hooks
    )
    for repeat, network, ranks, model, hook in grid:
        row = Row(model, network, ranks, hook, repeat, status="pending")
        if row.key not in have:
            groups.setdefault((repeat, network, ranks), []).append(row)
    return groups


def check_goodput(network: Network, console: Console) -> float:
    """Mbit/s of payload; raises NetworkError if the link is faster than it may be."""
    bits, rate = network.goodput(), network.link.bits_per_second
    if rate is not None and bits > TOO_FAST * rate:
        raise NetworkError(f"{network.link.name}: expected at most {rate} bit/s, got {bits:.0f}")
    if rate is not None and bits < TOO_SLOW * rate:
        console.print(
            f"warning: {network.link.name}: one connection carries {bits / 1e6:,.0f} Mbit/s only: "
            "this machine is too slow or too busy for this rate"
        )
    return bits / 1e6


def run_grid(args: argparse.Namespace, path: Path, console: Console) -> Iterator[Row]:
    """Measures what is missing in the CSV, appends and yields row by row."""
    links = {link.name: link for link in args.links}
    done = results.read(path)
    if args.retry:
        wanted = {row.key for rows in pending(args, done).values() for row in rows}
        path.write_text("")
        for row in done:
            if row.key not in wanted:
                results.append(path, row)
        done = results.read(path)
    for (_, name, ranks), rows in pending(args, done).items():
        with build_network(links[name], ranks) as network:
            goodput = check_goodput(network, console)
            for row in rows:
                row = measure(network, replace(row, goodput_mbit=goodput), args)
                results.append(path, row)
                yield row


def describe(row: Row) -> str:
    case = f"{row.model:9} {row.network:>9} {row.ranks} ranks  {row.hook:10}"
    if row.status != "ok":
        return f"{case} {row.status}: {row.reason}"
    return f"{case} {row.step_ms:9.1f} ms  {row.wire_bytes / 1e3:11,.1f} kB sent per rank"


def print_tables(rows: list[Row], console: Console) -> None:
    for (model, network, ranks), hooks in results.medians(rows).items():
        table = Table(title=f"{WORKLOADS[model].description}, {network}, {ranks} ranks")
        for column in ("hook", "step", "above noop", "codec", "sent per rank", "faster than DDP"):
            table.add_column(column, justify="left" if column == "hook" else "right")
        floor, dense = hooks.get("noop"), hooks.get("allreduce")
        for name, row in hooks.items():
            codec = row.compress_ms + row.decompress_ms
            table.add_row(
                HOOKS[name].description,
                f"{row.step_ms:,.1f} ms",
                f"{row.step_ms - floor.step_ms:,.1f} ms" if floor else "-",
                f"{codec:,.1f} ms" if codec else "-",
                f"{row.wire_bytes / 1e3:,.1f} kB",
                f"{dense.step_ms / row.step_ms:.2f}x" if dense else "-",
            )
        console.print(table)


def main(arguments: list[str] | None = None) -> None:
    args = parse_arguments(arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 100
    problem = unavailable() or next(filter(None, map(missing, args.models)), None)
    if problem:
        sys.exit(f"error: {problem}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "netbench.csv"
    try:
        total = sum(map(len, pending(args, results.read(path)).values()))
        columns = (TextColumn("cases"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("cases", total=total)
            for row in run_grid(args, path, console):
                console.print(describe(row), soft_wrap=True, markup=False)
                bar.advance(task)
    except (NetworkError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"stopped: the rows so far are in {path}; run the same command to go on")
    print_tables(results.read(path), console)
    console.print(f"rows: {path}")


if __name__ == "__main__":
    main()
