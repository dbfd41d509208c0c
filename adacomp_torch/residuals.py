"""Residuals of one DistributedDataParallel object on this rank, and the units they are in."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from . import _C
from .exchange import BucketExchange
from .layout import BinSizeOption, BucketParameter, bin_size_function, checked_bin_size

SUPPORTED = (torch.float32, torch.float16, torch.bfloat16)


class Residuals:
    """One flat float32 tensor per device for all compressed parameters, in registration order.

    With a loss scaler the gradients, and so the residuals, are in units that change: `scale` is the
    loss scale that `flat` is in. `settle` brings both up to date.
    """

    def __init__(
        self, ddp: DistributedDataParallel, option: BinSizeOption, scaler: GradScaler | None
    ) -> None:
        self.parameters: dict[str, BucketParameter] = {}
        self.flat: dict[torch.device, Tensor] = {}
        self.scale: dict[torch.device, Tensor] = {}
        self.scaler = scaler
        self._tensors: dict[str, weakref.ref[Tensor]] = {}
        self._names_by_id: dict[int, str] = {}
        named = _exchanged_parameters(ddp)
        owners = {
            id(parameter): owner
            for owner in ddp.module.modules()
            for parameter in owner.parameters(recurse=False)
        }
        bin_size_of = bin_size_function(option, [name for name, _ in named])
        sizes: dict[torch.device, int] = {}
        for name, parameter in named:
            owner = owners[id(parameter)]
            _check_parameter(name, parameter, owner)
            bin_size = checked_bin_size(name, bin_size_of(name, parameter, owner))
            offset = sizes.setdefault(parameter.device, 0)
            numel = parameter.numel()
            if bin_size is None:
                offset = -1
            else:
                sizes[parameter.device] += numel
            self.parameters[name] = BucketParameter(name, numel, bin_size, offset)
            self._tensors[name] = weakref.ref(parameter)
            self._names_by_id[id(parameter)] = name
        for device, size in sizes.items():
            self.flat[device] = torch.zeros(size, dtype=torch.float32, device=device)

    def of_bucket(self, tensors: Sequence[Tensor]) -> list[BucketParameter]:
        """The parameters that `tensors` are; RuntimeError if one belongs to another module."""
        names = [self._names_by_id.get(id(tensor), "") for tensor in tensors]
        for name, tensor in zip(names, tensors, strict=True):
            if not name or self._tensors[name]() is not tensor:
                raise RuntimeError(
                    "bucket: expected parameters of the DistributedDataParallel object that this "
                    f"AdaCompState was constructed for, got another of shape {tuple(tensor.shape)}"
                )
        return [self.parameters[name] for name in names]

    def view(self, name: str) -> Tensor:
        """See `AdaCompState.residual`."""
        if name not in self.parameters:
            raise KeyError(f"name: expected one of {', '.join(self.parameters)}, got {name!r}")
        entry = self.parameters[name]
        if entry.bin_size is None:
            raise ValueError(f"{name!r}: expected a compressed parameter, got one that is sent raw")
        tensor = self._tensors[name]()
        if tensor is None:
            raise RuntimeError(f"{name!r}: expected a live module, got one that has been freed")
        flat = self.flat[tensor.device][entry.residual_offset :][: entry.numel]
        # The order in which DDP lays a gradient into its bucket.
        if _C.is_non_overlapping_and_dense(tensor):
            return flat.as_strided(tensor.shape, tensor.stride())
        return flat

    def views(self) -> dict[str, Tensor]:
        return {
            name: self.view(name)
            for name, entry in self.parameters.items()
            if entry.bin_size is not None
        }

    # ---- loss scaling ----------------------------------------------------------------------------

    def settle(self, exchanges: Iterable[BucketExchange]) -> None:
        """Accounts for what the loss scaler did since the last call, without waiting for a device.

        If what `exchanges` decoded last is not finite, the scaler skips the optimizer's step: what
        was sent is put back. Then residuals are converted to the scaler's present scale.
        """
        if self.scaler is None:
            return
        exchanges = list(exchanges)
        for device, residual in self.flat.items():
            self._restore_if_skipped(device, exchanges)
            self._rescale(device, residual)

    def _restore_if_skipped(self, device: torch.device, exchanges: list[BucketExchange]) -> None:
        flags = [e.non_finite for e in exchanges if e.non_finite is not None]
        if flags:
            skipped = torch.stack([flag.to(device, non_blocking=True) for flag in flags]).any(0)
            self.restore(device, exchanges, skipped)

    def restore(
        self, device: torch.device, exchanges: Iterable[BucketExchange], condition: Tensor
    ) -> None:
        """Puts back what `exchanges` sent last if `condition` ([1], bool), but only once."""
        for exchange in exchanges:
            if exchange.device == device:
                exchange.restore(self.flat[device], condition)

    def _rescale(self, device: torch.device, residual: Tensor) -> None:
        now = self._scale_now(device)
        before = self.scale.get(device)
        self.scale[device] = now
        # On the CPU comparing is free and saves the pass; a GPU would have to be waited for.
        if before is None or (device.type == "cpu" and torch.equal(before, now)):
            return
        ratio = now / before
        ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)  # a scale of 0: all is lost
        largest = torch.finfo(torch.float32).max
        residual.mul_(ratio).clamp_(-largest, largest)

    def _scale_now(self, device: torch.device) -> Tensor:
        assert self.scaler is not None
        scale = getattr(self.scaler, "_scale", None)  # get_scale() would wait for the device
        if isinstance(scale, Tensor) and self.scaler.is_enabled():
            return scale.detach().to(device, torch.float32, non_blocking=True, copy=True)
        return torch.full((), self.scaler.get_scale(), dtype=torch.float32, device=device)

    def loss_scale(self) -> float:
        """The scale that the residuals are in; 1.0 without a scaler. Waits for the device."""
        return float(next(iter(self.scale.values()))) if self.scale else 1.0

    def load(self, saved: dict[str, Tensor], loss_scale: float) -> None:
        """Takes over residuals that are in units of `loss_scale`."""
        for name, value in saved.items():
            self.view(name).copy_(value if self.scaler is not None else value / loss_scale)
        if self.scaler is not None:
            for device in self.flat:
                self.scale[device] = torch.full((), loss_scale, device=device)


def _exchanged_parameters(ddp: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    # What was frozen after DDP was made is still in its buckets.
    frozen_later = set(map(id, ddp._module_parameters))
    return [
        (name, parameter)
        for name, parameter in ddp.module.named_parameters()
        if (parameter.requires_grad or id(parameter) in frozen_later)
        and name not in ddp.parameters_to_ignore
    ]


def _check_parameter(name: str, parameter: Tensor, owner: nn.Module) -> None:
    if parameter.dtype not in SUPPORTED:
        raise TypeError(
            f"parameter {name!r}: expected float32, float16 or bfloat16, got {parameter.dtype}"
        )
    if getattr(owner, "sparse", False) is True:
        raise TypeError(
            f"parameter {name!r}: expected dense gradients, got a {type(owner).__name__} with "
            "sparse=True"
        )
