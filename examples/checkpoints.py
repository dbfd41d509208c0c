"""Checkpoints of a run with AdaComp that survive a kill at any moment and another number of ranks.

Two ways to store the same: a file per rank with torch.save (`Files`), or sharded with
torch.distributed.checkpoint (`Sharded`). A checkpoint is written beside the earlier ones under
another name and renamed when all of it is on the disk, so that there always is a complete one.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from adacomp_torch import AdaCompState


class Files:
    """`shared.pt`, which is the same on every rank, and one file per rank for AdaComp."""

    def write(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: AdaCompState
    ) -> None:
        rank = dist.get_rank()
        _save(state.state_dict(), folder / f"adacomp-{rank}.pt")
        if rank == 0:
            shared = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "world_size": dist.get_world_size(),
            }
            _save(shared, folder / "shared.pt")

    def read(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: AdaCompState
    ) -> None:
        shared = torch.load(folder / "shared.pt")
        model.load_state_dict(shared["model"])
        optimizer.load_state_dict(shared["optimizer"])
        ranks = _ranks_to_read(shared["world_size"])
        _load(state, [torch.load(folder / f"adacomp-{rank}.pt") for rank in ranks])


class Sharded:
    """One torch.distributed.checkpoint in which every rank's residuals have a key of their own."""

    def write(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: AdaCompState
    ) -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state_dict_saver.save(
            {
                "model": model_state,
                "optimizer": optimizer_state,
                "world_size": torch.tensor(dist.get_world_size()),
                "adacomp": {str(dist.get_rank()): state.state_dict()},
            },
            checkpoint_id=folder,
        )

    def read(
        self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: AdaCompState
    ) -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        shared: dict[str, Any] = {
            "model": model_state,
            "optimizer": optimizer_state,
            "world_size": torch.tensor(0),
        }
        state_dict_loader.load(shared, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=shared["model"],
            optim_state_dict=shared["optimizer"],
        )
        # What is read is filled into states of the right shape: a fresh one's for each rank.
        ranks = _ranks_to_read(int(shared["world_size"]))
        saved = {"adacomp": {str(rank): state.state_dict() for rank in ranks}}
        state_dict_loader.load(saved, checkpoint_id=folder)
        _load(state, list(saved["adacomp"].values()))


FORMATS: dict[str, Files | Sharded] = {"files": Files(), "sharded": Sharded()}


def save(
    root: Path,
    step: int,
    form: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: AdaCompState,
) -> None:
    """Writes `root/step-N`; every rank calls it. A kill at any moment leaves what was there."""
    partial, final = root / f"step-{step}.partial", root / f"step-{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
        shutil.rmtree(final, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    FORMATS[form].write(partial, model, optimizer, state)
    dist.barrier()
    if dist.get_rank() == 0:
        partial.rename(final)
        _sync(root)


def latest(root: Path) -> int | None:
    """The step of the newest complete checkpoint, or None. Every rank gets rank 0's answer."""
    found = [
        int(match[1])
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := re.fullmatch(r"step-(\d+)", path.name))
    ]
    answer = [max(found, default=None)]
    dist.broadcast_object_list(answer, src=0)
    return answer[0]


def restore(
    root: Path,
    step: int,
    form: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: AdaCompState,
) -> None:
    """Reads `root/step-N`, whatever the number of ranks that wrote it; every rank calls it."""
    FORMATS[form].read(root / f"step-{step}", model, optimizer, state)


def _ranks_to_read(saved_world_size: int) -> list[int]:
    if saved_world_size == dist.get_world_size():
        return [dist.get_rank()]
    return list(range(saved_world_size))  # to be merged


def _load(state: AdaCompState, saved: list[dict[str, Any]]) -> None:
    state.load_state_dict(saved[0] if len(saved) == 1 else AdaCompState.merge_state_dicts(saved))


def _save(value: object, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Makes a rename last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
