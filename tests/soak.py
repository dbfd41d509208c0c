"""Random models, options and mishaps, with the invariants checked after every step.

    python tests/soak.py --minutes 60

Each episode follows from its seed: 2 or 3 ranks train a random module with random options of DDP
and of the hook, through unused parameters, no_sync, gradients that are zero, one-hot, huge or not
finite, and restarts from a checkpoint. A failure prints the line that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from models import assert_equal_on_all_ranks, gather_all
from ranks import RanksFailedError, run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_wrapper,
    fp16_compress_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

from adacomp_torch import AdaCompState, adacomp_hook, capacity

DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16)
WRAPPERS: dict[str, tuple[Callable[..., Any], torch.dtype]] = {
    "fp16": (fp16_compress_wrapper, torch.float16),
    "bf16": (bf16_compress_wrapper, torch.bfloat16),
}
KINDS = ("normal", "normal", "normal", "zero", "one hot", "ties", "wide", "not finite", "unused")


@dataclass
class Plan:
    """Everything that is the same on all ranks and follows from the seed."""

    seed: int
    world_size: int = 0
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    bins: list[int | None] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    ddp: dict[str, Any] = field(default_factory=dict)
    hook: dict[str, Any] = field(default_factory=dict)
    wrapper: str | None = None
    steps: int = 0
    restarts: set[int] = field(default_factory=set)
    unsynchronised: set[int] = field(default_factory=set)
    discarded: set[int] = field(default_factory=set)  # whose gradients are not used
    first_entry_bytes: int = 0
    dense_exchanges: int = 64

    def __post_init__(self) -> None:
        r = random.Random(self.seed)
        self.world_size = r.choice((2, 2, 3))
        count = r.randint(1, 8)
        self.shapes = [_shape(r) for _ in range(count)]
        self.dtypes = [r.choice(DTYPES)] * count
        if r.random() < 0.2:  # buckets of several dtypes
            self.dtypes = [r.choice(DTYPES) for _ in range(count)]
        self.bins = [r.choice((None, 1, 2, 50, 50, 63, 64, 500, 16383)) for _ in range(count)]
        self.order = r.sample(range(count), count)
        mode = r.choice(("plain", "find_unused_parameters", "static_graph"))
        self.ddp = {
            "bucket_cap_mb": r.choice((0.001, 0.01, 25)),
            "gradient_as_bucket_view": r.random() < 0.5,
            **({mode: True} if mode != "plain" else {}),
        }
        self.hook = {
            "scale": r.choice(("layer", "bin")),
            "threshold_factor": r.choice((1.0, 1.5, 2.0, 2.0, 3.0)),
            "start_iter": r.choice((0, 0, 0, 1, 3)),
            "dense_fallback": r.choice((None, 2.0, 2.0, 0.3)),
        }
        if set(self.dtypes) == {torch.float32}:
            self.wrapper = r.choice((None, None, "fp16", "bf16"))
        self.steps = r.randint(4, 16)
        self.restarts = {step for step in range(1, self.steps) if r.random() < 0.1}
        self.discarded = {step for step in range(self.steps) if r.random() < 0.1}
        if mode != "static_graph":  # which must do the same in every step
            self.unsynchronised = {step for step in range(self.steps) if r.random() < 0.2}
        self.dense_exchanges = r.choice((1, 3, 64))
        self.first_entry_bytes = r.choice((16, 256, 64 * 1024))  # little room: chunks are dropped

    def kind(self, step: int, rank: int, index: int) -> str:
        r = random.Random(f"{self.seed} {step} {rank} {index}")
        kind = r.choice(KINDS)
        # A backward that reaches no parameter at all never gets to DDP, and its peers wait.
        may_miss = "find_unused_parameters" in self.ddp and index != self.order[0]
        if kind == "unused" and not may_miss:
            return "zero"
        return kind

    def gradient(self, step: int, rank: int, index: int) -> Tensor | None:
        kind, shape = self.kind(step, rank, index), self.shapes[index]
        generator = torch.Generator().manual_seed(hash((self.seed, step, rank, index)) % 2**62)
        grad = torch.randn(shape, generator=generator)
        if kind == "unused":
            return None
        if kind == "ties":
            grad = (2 * grad).round()
        elif kind == "wide":
            grad = grad * torch.exp2(10 * torch.randn(shape, generator=generator))
        elif kind in ("zero", "one hot"):
            grad = torch.zeros(shape)
            if kind == "one hot" and grad.numel() > 0:
                grad.view(-1)[step % grad.numel()] = 1.0
        elif kind == "not finite" and grad.numel() > 0 and step % 3 == 0:
            grad.view(-1)[step % grad.numel()] = float("inf" if step % 2 else "nan")
        return grad.to(self.dtypes[index])


def _shape(r: random.Random) -> tuple[int, ...]:
    return r.choice(
        (
            lambda: (),
            lambda: (r.randint(0, 3),),
            lambda: (r.randint(1, 9000),),
            lambda: (r.randint(1, 90), r.randint(1, 90)),
            lambda: (r.randint(1, 20), r.randint(1, 9), 3, 3),
        )
    )()


class Module(nn.Module):
    """Its gradients are exactly the tensors that are passed to `forward`."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.weights = nn.ParameterList(
            torch.zeros(shape, dtype=dtype)
            for shape, dtype in zip(plan.shapes, plan.dtypes, strict=True)
        )

    def forward(self, grads: list[Tensor | None]) -> Tensor:
        total = torch.zeros((), requires_grad=True)
        for i in self.plan.order:
            if grads[i] is not None:
                total = total + (self.weights[i] * grads[i]).sum().float()
        return total


class Episode:
    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.module = Module(plan)
        self.sums: list[Tensor | None] = [None] * len(plan.shapes)  # since the last exchange
        self.wrap()

    def wrap(self) -> None:
        plan = self.plan
        bins = {f"weights.{i}": b for i, b in enumerate(plan.bins)}
        self.ddp = DistributedDataParallel(self.module, **plan.ddp)
        self.state = AdaCompState(self.ddp, bin_size=bins, **plan.hook)
        hook = WRAPPERS[plan.wrapper][0](adacomp_hook) if plan.wrapper else adacomp_hook
        self.ddp.register_comm_hook(self.state, hook)

    def restart(self) -> None:
        stored = io.BytesIO()
        torch.save(self.state.state_dict(), stored)
        stored.seek(0)
        del self.ddp, self.state
        self.wrap()
        self.state.load_state_dict(torch.load(stored))

    def residual(self, i: int) -> Tensor:
        if self.plan.bins[i] is None:
            return torch.zeros(self.plan.shapes[i])
        return self.state.residual(f"weights.{i}").clone()

    def residuals(self) -> list[Tensor]:
        return [self.residual(i) for i in range(len(self.plan.shapes))]

    def all_reduced(self) -> set[int]:
        """Parameters whose last exchange was dense, because compressing does not pay."""
        state = self.state
        last = [e for e in state._exchanges.values() if e.last_step == state._step]
        names = {p.name for e in last if e._shares is not None for p in e.parameters}
        return {i for i in range(len(self.plan.shapes)) if f"weights.{i}" in names}

    def step(self, step: int) -> None:
        plan = self.plan
        synchronised = step not in plan.unsynchronised
        grads = [plan.gradient(step, self.rank, i) for i in range(len(plan.shapes))]
        for i, grad in enumerate(grads):
            if grad is not None:
                self.sums[i] = grad if self.sums[i] is None else self.sums[i] + grad
        before = self.residuals()
        with contextlib.nullcontext() if synchronised else self.ddp.no_sync():
            self.ddp(grads).backward()
        after = self.residuals()
        if not synchronised:
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            return
        first = self.state._step < plan.hook["start_iter"]
        all_reduced = self.all_reduced()
        for i, p in enumerate(self.module.weights):
            what = f"step {step}, weights.{i}"
            sent_as = WRAPPERS[plan.wrapper][1] if plan.wrapper else p.dtype
            own = self.sums[i] if self.sums[i] is not None else torch.zeros(p.shape, dtype=p.dtype)
            dense = first or i in all_reduced
            check(what, p.grad, before[i], own.to(sent_as).float(), after[i], sent_as, dense)
            if not first and self.sums[i] is None:
                assert torch.equal(before[i], after[i]), f"{what}: unused, but its residual changed"
            if not first and step in plan.discarded and plan.bins[i] is not None:
                self.state.restore_skipped_step()
                check_restored(what, before[i], own.to(sent_as).float(), after[i], self.residual(i))
        used = [p.grad for p in self.module.weights if p.grad is not None]
        if used:
            assert_equal_on_all_ranks(used, f"step {step}")
        self.module.zero_grad()
        self.sums = [None] * len(plan.shapes)


def check(
    what: str,
    applied: Tensor | None,
    before: Tensor,
    own: Tensor,
    after: Tensor,
    dtype: torch.dtype,
    dense: bool,
) -> None:
    """Conservation within the rounding of float32 residuals and of the gradient's dtype."""
    world_size = dist.get_world_size()
    assert torch.isfinite(after).all(), f"{what}: a residual that is not finite"
    g = before + own
    gone = (~torch.isfinite(g)).any()
    lost_anywhere = any(bool(flag) for flag in gather_all(gone.reshape(1).int()))
    if applied is None:  # unused on every rank
        applied = torch.zeros(own.shape)
    if lost_anywhere:
        if bool(gone) and not dense and before.numel() > 0 and bool(after.any() | before.any()):
            kept = torch.where(torch.isfinite(g), g, before)
            assert torch.equal(after, kept), f"{what}: not finite, but something was subtracted"
        assert not torch.isfinite(applied).all(), f"{what}: a rank's inf or NaN does not show"
        return
    owed = sum(t.double() for t in gather_all(g)) - sum(t.double() for t in gather_all(after))
    size = sum(t.double() for t in gather_all(before.abs() + own.abs() + after.abs()))
    error = (world_size * applied.double() - owed).abs()
    rounding = torch.finfo(dtype).eps * world_size * applied.double().abs()
    tiny = world_size * torch.finfo(dtype).smallest_normal
    bound = 4 * torch.finfo(torch.float32).eps * size + rounding + tiny
    if dense:  # summed in the gradient's dtype
        bound = bound + world_size * torch.finfo(dtype).eps * size
    assert (error <= bound).all(), f"{what}: off by {float((error - bound).max())}"


def check_restored(what: str, before: Tensor, own: Tensor, after: Tensor, now: Tensor) -> None:
    g = torch.where(torch.isfinite(before + own), before + own, before)
    bound = 4 * torch.finfo(torch.float32).eps * (g.abs() + after.abs())
    assert ((now - g).abs() <= bound).all(), f"{what}: what was sent is not back"


def episode(rank: int, seed: int) -> tuple[int, int, int]:
    """Returns the steps taken, the chunks dropped and the dense exchanges of single buckets."""
    plan = Plan(seed)
    capacity._FIRST_ENTRY_BYTES = plan.first_entry_bytes
    capacity._DENSE_EXCHANGES = plan.dense_exchanges
    capacity._FIRST_RECEIVE_BYTES = plan.first_entry_bytes * plan.world_size
    run = Episode(plan, rank)
    for step in range(plan.steps):
        if step in plan.restarts:
            run.restart()
        run.step(step)
    stats = run.state.stats()
    assert stats["steps"] == 0 or stats["bytes_sent"] > 0
    return plan.steps, stats["dropped_chunks"], stats["fallbacks"]


def main(
    arguments: list[str] | None = None,
    episode: Callable[[int, int], tuple[int, int, int]] = episode,
) -> int:
    parser = argparse.ArgumentParser(description="Looks for broken invariants at random.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="of the first episode; default: from the clock")
    parser.add_argument("--episodes", type=int, help="at most so many")
    args = parser.parse_args(arguments)
    seed = int(time.time()) if args.seed is None else args.seed
    deadline = time.monotonic() + 60 * args.minutes
    done = steps = dropped = dense = 0
    while time.monotonic() < deadline and (args.episodes is None or done < args.episodes):
        try:
            results = run_ranks(episode, Plan(seed + done).world_size, seed + done)
        except RanksFailedError as error:
            print(f"{error}\nto repeat: python tests/soak.py --episodes 1 --seed {seed + done}")
            return 1
        done += 1
        steps += results[0][0]
        dropped += sum(count for _, count, _ in results)
        dense += results[0][2]
    print(
        f"{done} episodes from seed {seed}, {steps} steps, {dropped} chunks dropped, "
        f"{dense} exchanges all-reduced: no finding"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
