"""Other exchanges to compare with, and what can be put in front of one.

Rivals: `TopK`, `PowerSGD`, `Half`. In front: `LocalMomentum`, `ClipFirst`, `WarmUp`.
"""

from __future__ import annotations

import torch
from learners import Dense, Exchange
from torch import Tensor, nn


class TopK:
    """Each learner's largest |gradient + residual| of the whole model, with error feedback.

    Sends `sent_bytes` // 8 elements, each as a float32 and a 32-bit index.
    """

    def __init__(self, learners: int, numel: int, sent_bytes: int) -> None:
        self.count = max(1, min(numel, sent_bytes // 8))
        self.sent_bytes = 8 * self.count
        self.residuals = torch.zeros(learners, numel)

    def __call__(self, grads: Tensor, mean: Tensor) -> None:
        mean.zero_()
        for grad, residual in zip(grads, self.residuals, strict=True):
            residual += grad
            chosen = residual.abs().topk(self.count, sorted=False).indices
            mean.index_add_(0, chosen, residual[chosen])
            residual[chosen] = 0
        mean /= len(grads)


class PowerSGD:
    """Vogels et al., arXiv 1905.13727: rank-r factors of every matrix, warm start, error feedback.

    As torch's hook does, other than matrices, and matrices that the factors would not halve, are
    sent as they are. The factors' means are what all-reduces give: `sent_bytes` is their size.
    """

    def __init__(self, model: nn.Module, learners: int, rank: int) -> None:
        self.shapes = [
            (p.shape[0], p[0].numel()) if p.dim() > 1 else (1, p.numel())
            for p in model.parameters()
        ]
        self.rank = rank
        self.residuals = torch.zeros(learners, sum(n * m for n, m in self.shapes))
        generator = torch.Generator().manual_seed(0)
        self.right = [torch.randn(m, rank, generator=generator) for _, m in self.shapes]
        self.sent_bytes = 4 * sum(
            (n + m) * rank if self._factored(n, m) else n * m for n, m in self.shapes
        )

    def _factored(self, rows: int, columns: int) -> bool:
        return rows > 1 and 2 * (rows + columns) * self.rank < rows * columns

    def __call__(self, grads: Tensor, mean: Tensor) -> None:
        start = 0
        for i, (n, m) in enumerate(self.shapes):
            part = slice(start, start + n * m)
            start += n * m
            if not self._factored(n, m):
                mean[part] = grads[:, part].mean(0)
                continue
            matrices = (grads[:, part] + self.residuals[:, part]).view(-1, n, m)
            left = torch.linalg.qr((matrices @ self.right[i]).mean(0)).Q
            self.right[i] = (matrices.transpose(1, 2) @ left).mean(0)
            product = left @ self.right[i].T
            mean[part] = product.flatten()
            self.residuals[:, part] = (matrices - product).flatten(1)


class Half:
    """float16 on the wire, divided before the sum, as torch's `fp16_compress_hook`."""

    def __init__(self, learners: int, numel: int) -> None:
        self.sent_bytes = 2 * numel

    def __call__(self, grads: Tensor, mean: Tensor) -> None:
        total = torch.zeros(grads.shape[1], dtype=torch.float16)
        for grad in grads:
            total += (grad / len(grads)).half()
        mean.copy_(total)


class LocalMomentum:
    """Momentum on each learner's own gradient, before the exchange (as DGC, arXiv 1712.01887)."""

    def __init__(self, exchange: Exchange, learners: int, numel: int, momentum: float) -> None:
        self.exchange = exchange
        self.momentum = momentum
        self.velocities = torch.zeros(learners, numel)

    @property
    def sent_bytes(self) -> int:
        return self.exchange.sent_bytes

    def __call__(self, grads: Tensor, mean: Tensor) -> None:
        self.velocities.mul_(self.momentum).add_(grads)
        self.exchange(grads.copy_(self.velocities), mean)


class ClipFirst:
    """Each learner clips the norm of its own gradient before the exchange."""

    def __init__(self, exchange: Exchange, largest_norm: float) -> None:
        self.exchange = exchange
        self.largest_norm = largest_norm

    @property
    def sent_bytes(self) -> int:
        return self.exchange.sent_bytes

    def __call__(self, grads: Tensor, mean: Tensor) -> None:
        norms = torch.linalg.vector_norm(grads, dim=1, keepdim=True)
        grads *= (self.largest_norm / norms).clamp(max=1.0)
        self.exchange(grads, mean)


class WarmUp:
    """`steps` dense steps first: the option `start_iter`."""

    def __init__(self, exchange: Exchange, learners: int, numel: int, steps: int) -> None:
        self.dense = Dense(learners, numel)
        self.exchange = exchange
        self.steps = steps
        self.sent_bytes = 0

    def __call__(self, grads: Tensor, mean: Tensor) -> None:
        used = self.dense if self.steps > 0 else self.exchange
        used(grads, mean)
        self.sent_bytes = used.sent_bytes
        self.steps -= 1
