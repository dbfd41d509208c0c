"""What the training examples share: ranks, printing, progress, traffic, the final check."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from adacomp_torch import AdaCompState, adacomp_hook, default_bin_size
from adacomp_torch.layout import BinSizeOption

KINDS = ("dense", "layer", "bin")
DESCRIPTIONS = {
    "dense": "plain DDP",
    "layer": "AdaComp, layer scale",
    "bin": "AdaComp, bin scale",
}


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks. `console` prints on rank 0 and is silent elsewhere."""

    rank: int
    world_size: int
    device: torch.device
    console: Console

    def now(self) -> float:
        """Seconds, after everything queued on the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def sum(self, *values: float) -> list[float]:
        """Sums over all ranks, in float64."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return [float(value) for value in total]

    def require(self, problem: str | None) -> None:
        """Ends all ranks with exit code 2 and one sentence if any of them has a `problem`."""
        problems: list[str | None] = [None] * self.world_size
        dist.all_gather_object(problems, problem)
        if any(problems):
            # All together: torchrun ends the other ranks as soon as one has exited.
            for sentence in dict.fromkeys(filter(None, problems)):
                self.console.print(f"error: {sentence}", soft_wrap=True, markup=False)
            dist.barrier()
            dist.destroy_process_group()
            sys.exit(2)


@contextmanager
def distributed(device: str) -> Iterator[Ranks]:
    """Joins the ranks that torchrun started: Gloo for cpu, NCCL for cuda."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit("error: expected to be started by torchrun, as `torchrun --nproc-per-node=2 ...`")
    local_rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        count = torch.cuda.device_count()
        if local_rank >= count:
            sys.exit(
                f"error: --device cuda: rank {local_rank} expected a GPU, this host has {count}"
            )
        torch.cuda.set_device(local_rank)
    _join("nccl" if device == "cuda" else "gloo")
    console = Console(quiet=dist.get_rank() != 0, highlight=False)
    if not console.is_terminal:
        console.width = 118  # a file has no width, and rich's default of 80 would wrap the tables
    where = torch.device(device, local_rank) if device == "cuda" else torch.device(device)
    yield Ranks(dist.get_rank(), dist.get_world_size(), where, console)
    dist.destroy_process_group()  # not after an error: it could wait for ranks that are gone


def _join(backend: str) -> None:
    # torchrun's store still has the addresses of workers that died: a restarted one that reads them
    # before its peer has written new ones waits for a dead port (5 of 6 times with torch 2.15).
    store, rank, world_size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


@contextmanager
def progress(ranks: Ranks, label: str, total: int) -> Iterator[Callable[[int, str], None]]:
    """Yields `report(steps_done, note)`: a bar on a terminal, elsewhere a line for every note."""
    console = ranks.console
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    show_bar = console.is_terminal and not console.quiet
    with Progress(*columns, console=console, disable=not show_bar) as bar:
        task = bar.add_task(label, total=total, note="")

        def report(done: int, note: str) -> None:
            bar.update(task, completed=done)
            if note:
                bar.update(task, note=note)
                if not show_bar:
                    console.print(f"{label}  {done:>6,}/{total:,}  {note}")

        yield report


def wrap(
    model: nn.Module, kind: str, bin_size: BinSizeOption = default_bin_size
) -> tuple[DistributedDataParallel, AdaCompState | None]:
    """The model under DDP: as it is for "dense", with AdaComp's hook for "layer" and "bin"."""
    ddp = DistributedDataParallel(model)
    if kind == "dense":
        return ddp, None
    state = AdaCompState(ddp, scale="bin" if kind == "bin" else "layer", bin_size=bin_size)
    ddp.register_comm_hook(state, adacomp_hook)
    return ddp, state


def dense_bytes_per_step(model: nn.Module) -> int:
    """Bytes of all gradients, which is what plain DDP hands to its all-reduces in a step."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def bytes_sent(model: nn.Module, state: AdaCompState | None, steps: int) -> int:
    """Bytes this rank has handed to the gradients' collectives in its first `steps` steps.

    Whole payloads, with headers, tables and padding. At two ranks a ring all-reduce and an
    all-gather each put exactly these bytes on the wire.
    """
    if state is None:
        return steps * dense_bytes_per_step(model)
    return int(state.stats()["bytes_sent"])


def check_agreement(model: nn.Module, ranks: Ranks) -> None:
    """Raises on every rank unless all ranks' parameters are equal bit for bit."""
    mine = torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    differs = not torch.equal(_bits(mine), _bits(first))
    flags = torch.zeros(ranks.world_size, device=ranks.device)
    flags[ranks.rank] = float(differs)
    dist.all_reduce(flags)
    if flags.any():
        raise RuntimeError(
            "parameters: expected the same bits on all ranks, ranks "
            f"{flags.nonzero().flatten().tolist()} differ from rank 0"
        )


def _bits(values: Tensor) -> Tensor:
    """Compared as integers, because NaN is not equal to itself and -0.0 is equal to 0.0."""
    return values.view(torch.int32)
