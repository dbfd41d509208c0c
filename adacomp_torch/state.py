"""What AdaComp keeps between steps: residuals by parameter, exchanges by bucket, counts."""

from __future__ import annotations

import difflib
import inspect
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from . import _C, checkpoint, options
from .agreement import agree
from .exchange import BucketExchange, Codec
from .layout import BinSizeOption, BucketParameter, default_bin_size
from .ops import Scale, has_bin_scales
from .residuals import SUPPORTED, Residuals
from .version import __version__

# DDP cannot say which state its hook has, and two states would each keep half of the truth.
_states: weakref.WeakKeyDictionary[nn.Module, weakref.ref[AdaCompState]] = (
    weakref.WeakKeyDictionary()
)


class AdaCompState:
    """State of `adacomp_hook` for one DistributedDataParallel object, on this rank.

    Every rank constructs it with the same options; the first exchange of each bucket checks that.

    Args:
        module: the DistributedDataParallel object; only weakly referenced.
        bin_size: elements per bin (L_T in the paper), 1 to 16,383. An int for all parameters of at
            least 512 elements; or a mapping from name pattern (fnmatch, first match) to int or
            None; or a function (name, parameter, owning module) -> int | None. None sends a
            parameter raw. Default: see `default_bin_size`.
        scale: "layer" (the paper) or "bin" (one byte per bin: more bytes, less error per step).
        threshold_factor: soft threshold of H = G + (threshold_factor - 1) dW; finite, >= 1.
        start_iter: this many steps are dense (all-reduced) first.
        dense_fallback: a bucket of which world_size payloads would be at least this many times its
            gradients' bytes is all-reduced, with its residuals, for 64 exchanges, and then tried
            again; at 2.0 both ways put the same bytes on the wire. None: always compressed.
        grad_scaler: the torch.amp.GradScaler that scales this module's loss, if any. Residuals then
            follow its scale, and what was sent in a step that it skips is put back.
        process_group: group of the exchange; None is the module's own.

    Raises:
        TypeError: `module` is no DistributedDataParallel, or an option or a parameter has a wrong
            type.
        ValueError: an option is out of range, or the DDP object has a state already.
    """

    def __new__(cls, *_args: object, **options: object) -> AdaCompState:
        valid = list(inspect.signature(cls.__init__).parameters)[1:]
        for name in options:
            if name not in valid:
                close = difflib.get_close_matches(name, valid, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise TypeError(
                    f"AdaCompState: expected options {', '.join(valid[1:])}, got {name!r}{hint}"
                )
        return super().__new__(cls)

    def __init__(
        self,
        module: DistributedDataParallel,
        *,
        bin_size: BinSizeOption = default_bin_size,
        scale: Scale = "layer",
        threshold_factor: float = 2.0,
        start_iter: int = 0,
        dense_fallback: float | None = 2.0,
        grad_scaler: GradScaler | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(module, DistributedDataParallel):
            raise TypeError(
                "module: expected a DistributedDataParallel object (the wrapped model, not the "
                f"model itself), got {type(module).__name__}"
            )
        options.check_hook_is_free(module)
        previous = _states.get(module)
        if previous is not None and previous() is not None:
            raise ValueError(
                "module: expected a DistributedDataParallel object without an AdaCompState, "
                "got one that has it already; use that one"
            )
        has_bin_scales(scale)
        options.check_start_iter(start_iter)
        options.check_grad_scaler(grad_scaler)
        options.check_process_group(process_group)
        self.start_iter = start_iter
        factor = options.checked_factor(threshold_factor)
        self._codec = Codec(scale, factor, options.checked_fallback(dense_fallback))
        self._module = weakref.ref(module)
        self._process_group = process_group
        self._residuals = Residuals(module, bin_size, grad_scaler)
        self._exchanges: dict[tuple[object, ...], BucketExchange] = {}
        self._step = -1  # of the synchronised backward in progress, or of the last one
        self._steps_before = 0  # taken before this state was constructed or loaded
        self._seen: set[int] | None = None  # ids of the parameters exchanged in this step
        _states[module] = weakref.ref(self)

    # ---- used by the hook ------------------------------------------------------------------------

    def _group(self) -> dist.ProcessGroup:
        if self._process_group is not None:
            return self._process_group
        module = self._module()
        if module is None:
            raise RuntimeError(
                "adacomp_hook: the DistributedDataParallel object of this AdaCompState is gone; "
                "construct a state for the one in use"
            )
        return module.process_group

    def _begin(self, bucket: GradBucket) -> BucketExchange:
        """Everything that can fail, and the step count; only then may the hook communicate."""
        if not isinstance(bucket, GradBucket):
            raise TypeError(
                f"bucket: expected a torch.distributed.GradBucket, got {type(bucket).__name__}; "
                "compiled autograd is not supported"
            )
        buffer = bucket.buffer()
        tensors = bucket.parameters()
        ids = tuple(map(id, tensors))
        group = self._group()
        key = (ids, buffer.dtype, buffer.device, group)
        exchange = self._exchanges.get(key)
        is_new = exchange is None
        if exchange is None:
            parameters = self._checked_bucket(buffer, tensors)
            exchange = BucketExchange(parameters, buffer, self._codec, group)
            exchange.watches = self._residuals.scaler is not None
        self._count_step(ids)
        if is_new:
            # The operation first: a rank that does something else explains all the rest.
            fields = {"operation": "backward", **self._fields(group)}
            exchange.agree(fields, buffer.device)
            self._exchanges[key] = exchange
        exchange.last_step = self._step
        return exchange

    def _checked_bucket(self, buffer: Tensor, tensors: Sequence[Tensor]) -> list[BucketParameter]:
        parameters = self._residuals.of_bucket(tensors)
        names = [p.name for p in parameters]
        if buffer.layout != torch.strided:
            raise TypeError(f"bucket: expected dense gradients, got {buffer.layout} of {names}")
        if buffer.dtype not in SUPPORTED:
            raise TypeError(
                f"bucket: expected float32, float16 or bfloat16, got {buffer.dtype} of {names}"
            )
        numel = sum(tensor.numel() for tensor in tensors)
        if buffer.numel() != numel:
            raise RuntimeError(f"bucket: expected {numel} elements, got {buffer.numel()}")
        return parameters

    def _count_step(self, ids: tuple[int, ...]) -> None:
        """A step begins when a bucket's first parameter comes again: neither bucket indices nor
        their number tell, because DDP rebuilds buckets and may skip some."""
        if self._seen is None or ids[0] in self._seen:
            self._settle()
            for exchange in self._exchanges.values():
                if exchange.last_step < self._step:
                    exchange.release_buffers()
            self._step += 1
            self._seen = set()
        self._seen.update(ids)

    def _fields(self, group: dist.ProcessGroup) -> dict[str, object]:
        return {
            "adacomp_torch version": __version__,
            "wire version": _C.wire_version,
            "world_size": dist.get_world_size(group),
            "scale": self._codec.scale,
            "threshold_factor": self._codec.threshold_factor,
            "start_iter": self.start_iter,
            "dense_fallback": self._codec.dense_fallback,
            "grad_scaler": self._residuals.scaler is not None,
            "step": self._step,
        }

    # ---- for users -------------------------------------------------------------------------------

    def residual(self, name: str) -> Tensor:
        """Float32 view of a parameter's residual on this rank, in the parameter's shape and strides
        (flat if these overlap or have gaps). It changes with every step.

        Raises KeyError for an unknown name, ValueError for a parameter that is sent raw.
        """
        self._settle()
        return self._residuals.view(name)

    def _settle(self) -> None:
        self._residuals.settle(e for e in self._exchanges.values() if e.last_step == self._step)

    def restore_skipped_step(self) -> None:
        """Puts back into the residuals what this rank sent in the last backward. Call it, on every
        rank, when you discard that backward's gradients instead of taking an optimizer step.

        With `grad_scaler` the steps that the scaler skips are put back without it.
        """
        exchanges = [e for e in self._exchanges.values() if e.last_step == self._step]
        for device in self._residuals.flat:
            condition = torch.ones(1, dtype=torch.bool, device=device)
            self._residuals.restore(device, exchanges, condition)

    def check(self) -> None:
        """Raises RuntimeError for a malformed payload that a GPU has found: it waits for what the
        device still decodes. On the CPU the backward raises it."""
        for exchange in self._exchanges.values():
            exchange.check()

    def stats(self, *, per_parameter: bool = False) -> dict[str, Any]:
        """Counts of this rank since construction or `load_state_dict`.

        - steps, compressed_steps: synchronised steps, and those of them after `start_iter`.
        - bytes_sent: bytes given to the collectives (whole payloads; in dense steps the gradients).
        - exchanges: of single buckets, after `start_iter`. fallbacks, fallback_bytes: those of them
          that were all-reduced because compressing did not pay, and the bytes of these.
        - dense_bytes: bytes of the gradients. compression_ratio: dense_bytes / bytes_sent.
        - entries_per_bin: elements sent per bin and exchange. dropped_chunks: sent later instead,
          because they did not fit. dropped_share: of all chunks in compressed exchanges.
        - residual_max: largest |residual|.
        - compress_seconds, exchange_seconds (from the all-gather's start to its end, mostly
          overlapped with the backward), decompress_seconds: host time, summed over buckets.
        - parameters, with `per_parameter`: name -> bin_size, entries_per_bin, dropped_chunks,
          dropped_share, residual_max of each compressed parameter.

        Waits for the device; not for use in every step of a fast loop.
        """
        self.check()
        self._settle()
        # Entries, dropped chunks, bins, chunks.
        counts = {name: [0, 0, 0, 0] for name in self._residuals.parameters}
        totals = dict.fromkeys(
            ("exchanges", "fallbacks", "fallback_bytes", "bytes_sent", "dense_bytes"), 0
        )
        seconds = dict.fromkeys(("compress_seconds", "exchange_seconds", "decompress_seconds"), 0.0)
        for exchange in self._exchanges.values():
            exchange.add_to(totals, seconds, counts)
        steps = self._step + 1 - self._steps_before
        result: dict[str, Any] = {
            "steps": steps,
            "compressed_steps": min(steps, max(0, self._step + 1 - self.start_iter)),
            **totals,
            "compression_ratio": totals["dense_bytes"] / max(1, totals["bytes_sent"]),
            **_per_bin([sum(column) for column in zip(*counts.values(), strict=True)]),
            "residual_max": max((_abs_max(r) for r in self._residuals.flat.values()), default=0.0),
            **seconds,
        }
        if per_parameter:
            result["parameters"] = {
                name: {
                    "bin_size": self._residuals.parameters[name].bin_size,
                    **_per_bin(counts[name]),
                    "residual_max": _abs_max(residual),
                }
                for name, residual in self._residuals.views().items()
            }
        return result

    # ---- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: step and residuals by parameter name. Every rank must save its own.

        Tensors and plain types only, so that `torch.load` takes it with `weights_only=True`.
        Payload sizes are not part of it: a resumed run has the bits of an uninterrupted one as long
        as neither drops a chunk after the save.
        """
        self.check()
        self._settle()
        group = self._group()
        return {
            "format": checkpoint.FORMAT,
            "rank": dist.get_rank(group),
            "world_size": dist.get_world_size(group),
            "step": self._step + 1,
            "loss_scale": self._residuals.loss_scale(),
            "residuals": {name: view.clone() for name, view in self._residuals.views().items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what this rank saved, or a merged state (see `merge_state_dicts`).

        Collective: every rank must call it, between the same two steps. If it fails on one rank it
        fails on all, and nothing is changed on any.

        Raises:
            ValueError: format, rank, world_size, parameter names or shapes are not this run's.
            RuntimeError: the ranks' options or steps differ, or another rank's state is wrong.
        """
        group = self._group()
        error = checkpoint.mismatch(
            state_dict, self._residuals.views(), dist.get_rank(group), dist.get_world_size(group)
        )
        device = next(iter(self._residuals.flat), torch.device("cpu"))
        fields = {
            "operation": "load_state_dict",
            "what load_state_dict found wrong": error,  # it explains the fields after it
            **self._fields(group),
            "step": None if error else state_dict["step"],
            "loss_scale": None if error else state_dict["loss_scale"],
            "bin_size": {
                name: entry.bin_size for name, entry in self._residuals.parameters.items()
            },
        }
        try:
            agree(fields, group, device)
        except RuntimeError as difference:
            raise (ValueError(error) if error else difference) from None
        if error:
            raise ValueError(error)
        if state_dict["rank"] is None:
            warnings.warn(
                "each rank starts from the mean of the saved ranks' residuals: the run continues, "
                "but not bit for bit as with the saved world_size",
                stacklevel=2,
            )
        self._residuals.load(state_dict["residuals"], state_dict["loss_scale"])
        self._step = state_dict["step"] - 1
        self._steps_before = state_dict["step"]
        self._seen = None
        self._exchanges.clear()

    @staticmethod
    def merge_state_dicts(state_dicts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state for another world size, from the states of all ranks of a run.

        Every rank of the new run loads it. Residuals are means over the ranks (in float64, rounded
        once), so that what all ranks together still owe each parameter stays the same.

        Raises ValueError if the list is not exactly the ranks 0 to world_size - 1 of one step.
        """
        return checkpoint.merge(state_dicts)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "AdaCompState belongs to a live DistributedDataParallel object and cannot be copied or "
            "pickled, nor can that object: use its `module`, and this state's state_dict()"
        )


def _abs_max(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() > 0 else 0.0


def _per_bin(counts: Sequence[int]) -> dict[str, float]:
    entries, dropped, bins, chunks = counts
    return {
        "entries_per_bin": entries / max(1, bins),
        "dropped_chunks": dropped,
        "dropped_share": dropped / max(1, chunks),
    }
