"""Training that is killed and goes on: checkpoints of every rank, restarts and other rank counts.

    run="torchrun --standalone --max-restarts=1"
    $run --nproc-per-node=2 examples/train_resumable.py --crash-at 25
    $run --nproc-per-node=3 examples/train_resumable.py --steps 90
    $run --nproc-per-node=1 examples/train_resumable.py --steps 120

The first loses a rank in step 25, is restarted by torchrun and carries on from step 20. The others
carry on with other numbers of ranks, from the mean of the saved residuals.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path

import checkpoints
import torch
from common import Ranks, check_agreement, distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adacomp_torch import AdaCompState, adacomp_hook


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small network, resumable at any time.")
    parser.add_argument("--steps", type=int, default=60, help="to train in all")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--format", choices=checkpoints.FORMATS, default="files")
    parser.add_argument("--bin-size", type=int, default=50)
    parser.add_argument("--crash-at", type=int, help="rank 1 dies in this step, the first time")
    return parser.parse_args()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32))


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    """Predicting a fixed rotation of the input; every rank and step has samples of its own."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss: Tensor = (module(x) - x.roll(1, dims=1)).square().mean()
    return loss


def digest(module: nn.Module) -> str:
    """Equal for equal bits of all parameters."""
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def train(args: argparse.Namespace, ranks: Ranks) -> None:
    module = model()
    ddp = DistributedDataParallel(module)
    state = AdaCompState(ddp, bin_size=args.bin_size)
    ddp.register_comm_hook(state, adacomp_hook)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    first = checkpoints.latest(args.folder) or 0
    if first > 0:
        checkpoints.restore(args.folder, first, args.format, module, optimizer, state)
        ranks.console.print(f"{ranks.world_size} ranks resume at step {first}")
    is_first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    for step in range(first, args.steps):
        optimizer.zero_grad()
        loss_of(ddp, ranks.rank, step).backward()
        if step == args.crash_at and ranks.rank == 1 and is_first_start:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        if (step + 1) % args.every == 0:
            checkpoints.save(args.folder, step + 1, args.format, module, optimizer, state)
    with torch.no_grad():
        loss = float(loss_of(module, 0, 10**6))  # samples that no rank trains on
    check_agreement(module, ranks)
    dropped = ranks.sum(state.stats()["dropped_chunks"])[0]
    ranks.console.print(
        f"step {args.steps}: loss {loss:.4f}, {dropped:.0f} chunks dropped, "
        f"parameters {digest(module)}"
    )


if __name__ == "__main__":
    options = arguments()
    with distributed("cpu") as ranks:
        train(options, ranks)
