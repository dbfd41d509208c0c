"""Many learners in one process: data-parallel training through the package's own codec.

`Learners` takes one gradient per learner from one model, lets an exchange turn them into what the
optimizer sees, and leaves that in `p.grad`. `AdaComp` is the exchange of `adacomp_hook`: the same
`ops.compress` per learner and the same `ops.decompress`, so 128 learners need no 128 processes.
tests/test_studies.py holds it to real DDP ranks bit for bit.

Three things differ from the hook, none in the arithmetic. All parameters are one bucket: a scale
belongs to a parameter and a decoded element to its place, so how DDP cuts its buckets does not
show in the result. Payloads have worst-case capacity: no chunk is ever dropped, where the hook may
send a chunk a step later. `sent_bytes` says what the hook's rule for capacities would send. And it
always compresses, as with `dense_fallback=None`, however many the learners are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from adacomp_torch import default_bin_size, ops
from adacomp_torch.capacity import Capacity, first_entry_bytes
from adacomp_torch.layout import BinSizeOption, bin_size_function, make_layout

_NEEDED_AT = slice(16, 24)  # header field needed_bytes, int64: see docs/wire-format.md
_DISTANCE = 2  # the hook sizes exchange n by the headers of n - 2 and before


class Exchange(Protocol):
    """What the learners do with their gradients in each step."""

    @property
    def sent_bytes(self) -> int:
        """By one learner in the last step, as given to the collective."""

    def __call__(self, grads: Tensor, mean: Tensor) -> None:
        """Writes `mean` ([numel], float32), the optimizer's gradient, from `grads` ([learners,
        numel], float32), which it may overwrite. Flat: parameter after parameter."""


class Dense:
    """The mean of all gradients, float32, summed in the learners' order."""

    def __init__(self, learners: int, numel: int) -> None:
        self.sent_bytes = 4 * numel  # what an all-reduce is given

    def __call__(self, grads: Tensor, mean: Tensor) -> None:
        mean.copy_(grads[0])
        for grad in grads[1:]:
            mean += grad
        mean /= len(grads)


class AdaComp:
    """The exchange of `adacomp_hook`, with the same options.

    `residuals`: [learners, elements of all compressed parameters], float32.
    `payloads`: [learners, worst-case capacity], uint8, of the last step.
    `counters`: [learners, parameters, 2], int64: entries sent and chunks dropped (none) so far.
    """

    def __init__(
        self,
        model: nn.Module,
        learners: int,
        *,
        bin_size: BinSizeOption = default_bin_size,
        scale: ops.Scale = "layer",
        threshold_factor: float = 2.0,
    ) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        self.numels = [p.numel() for p in model.parameters()]
        self.bin_sizes = _bin_sizes(model, bin_size)
        self.scale: ops.Scale = scale
        self.threshold_factor = threshold_factor
        self.layout = make_layout(self.numels, self.bin_sizes)
        self.fixed, self.capacity = ops.payload_capacity(self.layout, scale=scale)
        compressed = sum(n for n, b in zip(self.numels, self.bin_sizes, strict=True) if b)
        self.residuals = torch.zeros(learners, compressed)
        self.payloads = torch.zeros(learners, self.capacity, dtype=torch.uint8)
        self.counters = torch.zeros(learners, len(self.numels), 2, dtype=torch.int64)
        self.step = 0
        self.needed_bytes = 0.0  # mean over the learners: payloads with nothing to spare
        self.sent_bytes = 0
        self._capacity = Capacity(
            fixed=self.fixed,
            most=self.capacity,
            first_entry_bytes=first_entry_bytes(self.fixed, sum(self.numels), learners),
            pays_up_to=None,
        )
        self._needed: deque[int] = deque()  # of the last exchanges, the most of all learners

    def __call__(self, grads: Tensor, mean: Tensor) -> None:
        for grad, residual, payload, counters in zip(
            grads, self.residuals, self.payloads, self.counters, strict=True
        ):
            ops.compress(
                grad,
                residual,
                self.layout,
                payload,
                step=self.step,
                scale=self.scale,
                threshold_factor=self.threshold_factor,
                counters=counters,
            )
        ops.decompress(
            self.payloads,
            mean,
            self.layout,
            step=self.step,
            scale=self.scale,
            threshold_factor=self.threshold_factor,
        )
        self._count_bytes()
        self.step += 1

    def _count_bytes(self) -> None:
        if len(self._needed) == _DISTANCE:
            self._capacity.add(self._needed.popleft())
        self.sent_bytes = self._capacity.payload_bytes()
        needed = self.payloads[:, _NEEDED_AT].contiguous().view(torch.int64)
        self.needed_bytes = float(needed.double().mean())
        self._needed.append(int(needed.max()))

    def residual(self, name: str) -> Tensor:
        """View of a compressed parameter's residuals, [learners, numel]."""
        row = self.layout[self.names.index(name)]
        offset, numel = int(row[3]), int(row[1])
        return self.residuals[:, offset : offset + numel]


def _bin_sizes(model: nn.Module, option: BinSizeOption) -> list[int | None]:
    function = bin_size_function(option, [name for name, _ in model.named_parameters()])
    owners = {id(p): owner for owner in model.modules() for p in owner.parameters(recurse=False)}
    return [function(name, p, owners[id(p)]) for name, p in model.named_parameters()]


class Learners:
    """Data-parallel training of `model`: every learner has the same parameters and its own batch.

    Raises ValueError for a model with buffers (DDP would broadcast the first learner's), or with a
    parameter that does not lie in memory row by row (the hook bins in memory order).
    """

    def __init__(self, model: nn.Module, learners: int, exchange: Exchange) -> None:
        for name, _ in model.named_buffers():
            raise ValueError(f"model: expected no buffers, got {name!r}")
        for name, p in model.named_parameters():
            if not p.is_contiguous():
                raise ValueError(f"parameter {name!r}: expected it contiguous, got {p.stride()}")
        self.parameters: list[nn.Parameter] = list(model.parameters())
        numels = [p.numel() for p in self.parameters]
        self.exchange = exchange
        self.grads = torch.zeros(learners, sum(numels))
        self.mean = torch.zeros(sum(numels))
        for p, flat in zip(self.parameters, self.mean.split(numels), strict=True):
            p.grad = flat.view_as(p)

    def backward(self, loss_of: Callable[[int], Tensor]) -> float:
        """Exchanges the gradients of `loss_of(learner)` and leaves the result in `p.grad`.

        Returns the learners' mean loss. Do not call `zero_grad`: `p.grad` are views of `mean`.
        """
        total = 0.0
        for learner, row in enumerate(self.grads):
            loss = loss_of(learner)
            grads = torch.autograd.grad(loss, self.parameters)
            torch.cat([grad.reshape(-1) for grad in grads], out=row)
            total += float(loss.detach())
        self.exchange(self.grads, self.mean)
        return total / len(self.grads)
