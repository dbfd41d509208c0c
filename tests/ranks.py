"""Runs a function on several ranks, each a process of its own, in a Gloo group.

The first rank that fails ends all; a rank that hangs is ended from outside at the time limit.
Either way the error shows what every rank did: a traceback, an exit code, or its threads' stacks.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

# Each rank is a fresh process, forked from a server that has imported torch and done nothing else:
# as clean as "spawn", which imports torch anew in every rank (2 s of a core instead of 0.1 s).
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])

_STACK_SIGNAL = signal.SIGUSR1
_GRACE_SECONDS = 1.0  # for the other ranks to fail by themselves, and for stacks to be written


class RanksFailedError(Exception):
    """At least one rank did not return; the text has the first cause and every rank's report."""


def _rank_main(
    function: Callable[..., Any], rank: int, world_size: int, args: tuple[Any, ...], folder: Path
) -> None:
    stacks = (folder / f"stacks{rank}").open("w")
    faulthandler.register(_STACK_SIGNAL, stacks, all_threads=True)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = function(rank, *args)
        (folder / f"result{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        # Complete before it has its name: the parent may look at any time.
        (folder / f"partial{rank}").write_text(traceback.format_exc())
        (folder / f"partial{rank}").rename(folder / f"traceback{rank}")
        os._exit(1)  # a live process group could keep the interpreter from ending


def _wait_for(
    processes: list[Any], folder: Path, deadline: float, stop_at_failure: bool
) -> list[int]:
    """Waits until all processes end, one fails, or the deadline; returns failed ranks in order."""
    failed: list[int] = []
    running = dict(enumerate(processes))
    while running and not (failed and stop_at_failure):
        left = deadline - time.monotonic()
        ready = wait([p.sentinel for p in running.values()], timeout=max(0.0, left))
        if not ready:
            break
        for rank, process in list(running.items()):
            if process.sentinel in ready:
                process.join()
                del running[rank]
                if process.exitcode != 0 or not (folder / f"result{rank}").exists():
                    failed.append(rank)
    return failed


def _report(rank: int, process: Any, folder: Path) -> str:
    text = folder / f"traceback{rank}"
    if text.exists():
        return f"rank {rank} raised:\n{text.read_text()}"
    if process.exitcode is None:
        return f"rank {rank} was still running:\n{(folder / f'stacks{rank}').read_text()}"
    if process.exitcode < 0:
        return f"rank {rank} died of {signal.Signals(-process.exitcode).name}\n"
    if process.exitcode > 0:
        return f"rank {rank} exited with code {process.exitcode}\n"
    if not (folder / f"result{rank}").exists():
        return f"rank {rank} exited before it returned\n"
    return f"rank {rank} returned\n"


def _failure(
    processes: list[Any], failed: list[int], timeout: float, folder: Path
) -> RanksFailedError:
    first = f"rank {failed[0]} failed first" if failed else f"no end within {timeout} s"
    _wait_for(processes, folder, time.monotonic() + _GRACE_SECONDS, stop_at_failure=False)
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, _STACK_SIGNAL)
    _wait_for(processes, folder, time.monotonic() + _GRACE_SECONDS, stop_at_failure=False)
    order = failed + [rank for rank in range(len(processes)) if rank not in failed]
    return RanksFailedError("\n".join([first, *(_report(r, processes[r], folder) for r in order)]))


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Calls the module-level `function(rank, *args)` on every rank; returns the values by rank.

    Raises RanksFailedError if a rank raises, exits or dies, or is not done in `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="ranks") as name:
        folder = Path(name)
        processes = [
            _processes.Process(target=_rank_main, args=(function, rank, world_size, args, folder))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            failed = _wait_for(processes, folder, time.monotonic() + timeout, stop_at_failure=True)
            if failed or any(p.is_alive() for p in processes):
                raise _failure(processes, failed, timeout, folder)
            return [pickle.loads((folder / f"result{r}").read_bytes()) for r in range(world_size)]
        finally:
            for process in processes:
                process.kill()
                process.join()
