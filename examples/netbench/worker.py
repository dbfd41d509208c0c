"""One rank of one measurement; started by run.py on its host. Writes one JSON object.

    python worker.py --rank 0 --ranks 2 --store 10.77.0.1:29500 --model mlp --hook layer
        --seconds 3 --min-steps 5 --max-steps 50 --result rank0.json

A step is zero_grad, forward, backward with its exchange, and optimizer.step.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import faulthandler
import json
import os
import signal
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from hooks import HOOKS
from network import INTERFACE, interface_bytes
from torch import Tensor, nn
from torch._C._distributed_c10d import Store, TCPStore
from workloads import WORKLOADS, Workload

BATCHES = 8  # each rank's own, in turn
PR_SET_PDEATHSIG = 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store", required=True, help="address:port of rank 0")
    parser.add_argument("--model", choices=WORKLOADS, required=True)
    parser.add_argument("--hook", choices=HOOKS, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="of timed steps, about")
    parser.add_argument("--min-steps", type=int, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True, help="of a collective, seconds")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of run.py")
    return parser.parse_args()


def die_with_parent(parent: int) -> None:
    """A worker must not outlive a killed run.py: it would keep its namespace and a core."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def join(args: argparse.Namespace) -> Store:
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    host, port = args.store.split(":")
    timeout = datetime.timedelta(seconds=args.timeout)
    store = TCPStore(host, int(port), args.ranks, args.rank == 0, timeout)
    dist.init_process_group(
        "gloo", store=store, rank=args.rank, world_size=args.ranks, timeout=timeout
    )
    return store


class Trainer:
    """A model under DDP with one of the hooks, and its optimizer."""

    def __init__(self, workload: Workload, hook: str, rank: int) -> None:
        torch.manual_seed(0)
        self.workload = workload
        self.module: nn.Module = workload.make()
        self.ddp, self.codec_seconds = HOOKS[hook].wrap(self.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(1 + rank)
        self.batches = [workload.draw(generator) for _ in range(BATCHES)]
        self.steps = 0

    def step(self) -> float:
        """Seconds of one training step."""
        batch: tuple[Tensor, Tensor] = self.batches[self.steps % BATCHES]
        self.steps += 1
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.workload.loss(self.ddp, *batch).backward()
        self.optimizer.step()
        return time.perf_counter() - began


def agree_on_steps(args: argparse.Namespace, store: Store, typical: float) -> int:
    """As many steps as fit into --seconds, by rank 0's clock."""
    if args.rank == 0:
        wanted = int(args.seconds / max(typical, 1e-6))
        store.set("steps", str(max(args.min_steps, min(args.max_steps, wanted))))
    return int(store.get("steps"))


def measure(args: argparse.Namespace, store: Store) -> dict[str, object]:
    trainer = Trainer(WORKLOADS[args.model], args.hook, args.rank)
    typical = statistics.median([trainer.step() for _ in range(args.warm_up)][-3:])
    steps = agree_on_steps(args, store, typical)
    dist.barrier()
    codec, sent, cpu = trainer.codec_seconds(), interface_bytes(), time.process_time()
    seconds = [trainer.step() for _ in range(steps)]
    cpu = time.process_time() - cpu
    # After a barrier, which is a few hundred bytes: until then this rank may still pass data on.
    dist.barrier()
    sent = interface_bytes() - sent
    return {
        "seconds": seconds,
        "wire_bytes": sent / steps,
        "cpu_seconds": cpu / steps,
        **{name: (now - codec[name]) / steps for name, now in trainer.codec_seconds().items()},
    }


def write_whole(path: Path, text: str) -> None:
    """The file is there with all of `text`, or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


def main() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # run.py asks a rank that hangs
    args = parse_arguments()
    die_with_parent(args.parent)
    torch.set_num_threads(1)
    store = join(args)
    write_whole(args.result, json.dumps(measure(args, store)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
