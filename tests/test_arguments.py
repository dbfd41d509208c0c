"""Wrong arguments of the ops: one sentence with name, expected and actual, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adacomp_torch import ops
from adacomp_torch.layout import make_layout

NUMEL = 1000


def arguments() -> dict[str, Any]:
    layout = make_layout([900, 100], [50, None])
    capacity = ops.payload_capacity(layout)[1]
    return {
        "grad": torch.randn(NUMEL),
        "residual": torch.randn(900),
        "layout": layout,
        "payload": torch.full((capacity,), 0xFF, dtype=torch.uint8),
        "step": 0,
        "scale": "layer",
        "threshold_factor": 2.0,
        "counters": torch.zeros((2, 2), dtype=torch.int64),
    }


def rows(*values: tuple[int, int, int, int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


RAW = (900, 100, 0, -1)
OVERLAPPING_MEMORY = torch.zeros(2 * NUMEL)

# argument, a wrong value of it, and the start of the sentence that names it
COMPRESS: list[tuple[str, Callable[[], Any], str]] = [
    ("grad", lambda: torch.randn(NUMEL).double(), "grad: expected dtype float32, float16 or bf"),
    ("grad", lambda: torch.randn(NUMEL).cfloat(), "grad: expected dtype float32, float16 or bf"),
    ("grad", lambda: torch.ones(NUMEL, dtype=torch.int32), "grad: expected dtype float32, float16"),
    ("grad", lambda: torch.randn(999), "grad: expected the layout's 1000 elements, got 999"),
    ("grad", lambda: torch.randn(10, 100), "grad: expected a 1-D contiguous tensor"),
    ("grad", lambda: torch.randn(2000)[::2], "grad: expected a 1-D contiguous tensor"),
    ("residual", lambda: torch.zeros(900).half(), "residual: expected dtype float32, got Half"),
    ("residual", lambda: torch.zeros(899), "residual: expected room for 900 elements of segment 0"),
    ("residual", lambda: torch.zeros(1800)[::2], "residual: expected a 1-D contiguous tensor"),
    ("layout", lambda: rows((0, 900, 50, 0), RAW).int(), "layout: expected dtype int64, got Int"),
    ("layout", lambda: torch.zeros(2, 5).long(), "layout: expected a contiguous [segments, 4]"),
    ("layout", lambda: torch.zeros(8).long(), "layout: expected a contiguous [segments, 4]"),
    (
        "layout",
        lambda: rows((0, 900, 16384, 0), RAW),
        "layout: expected bin_size of segment 0 from 1",
    ),
    ("layout", lambda: rows((0, 900, -1, 0), RAW), "layout: expected bin_size of segment 0 from 1"),
    (
        "layout",
        lambda: rows((0, 900, 0, 0), RAW),
        "layout: expected residual_offset of segment 0 to",
    ),
    (
        "layout",
        lambda: rows((0, 900, 50, -1), RAW),
        "layout: expected residual_offset of segment 0",
    ),
    ("layout", lambda: rows((1, 899, 50, 0), RAW), "layout: expected segment 0 at bucket_offset 0"),
    (
        "layout",
        lambda: rows((0, 899, 50, 0), RAW),
        "layout: expected segment 1 at bucket_offset 899",
    ),
    ("layout", lambda: rows((0, -1, 50, 0), RAW), "layout: expected numel of segment 0 from 0"),
    ("layout", lambda: rows((0, 2**62, 50, 0), RAW), "layout: expected numel of segment 0 from 0"),
    ("layout", lambda: rows((0, 2**47, 0, -1)), "layout: expected at most 4294967280 bytes before"),
    (
        "layout",
        lambda: rows((0, 500, 50, 0), (500, 500, 50, 400)),
        "layout: expected disjoint residual ranges, got one at 400 before the end 500",
    ),
    ("payload", lambda: torch.zeros(4096), "payload: expected dtype uint8, got Float"),
    (
        "payload",
        lambda: torch.zeros(64, dtype=torch.uint8),
        "payload: expected a capacity from 464",
    ),
    (
        "payload",
        lambda: torch.zeros(4090, dtype=torch.uint8),
        "payload: expected a capacity that is",
    ),
    (
        "payload",
        lambda: torch.zeros(4097, dtype=torch.uint8)[1:],
        "payload: expected memory aligned",
    ),
    (
        "payload",
        lambda: torch.zeros((1, 4096), dtype=torch.uint8),
        "payload: expected a contiguous 1",
    ),
    ("step", lambda: -1, "step: expected >= 0, got -1"),
    ("scale", lambda: "tensor", "scale: expected 'layer' or 'bin', got 'tensor'"),
    ("threshold_factor", lambda: 0.5, "threshold_factor: expected a finite float32 >= 1, got 0.5"),
    ("threshold_factor", lambda: float("nan"), "threshold_factor: expected a finite float32 >= 1"),
    (
        "threshold_factor",
        lambda: 1e300,
        "threshold_factor: expected a finite float32 >= 1, got 1e+",
    ),
    ("counters", lambda: torch.zeros((2, 2)), "counters: expected a contiguous int64 tensor"),
    (
        "counters",
        lambda: torch.zeros((3, 2)).long(),
        "counters: expected a contiguous int64 tensor",
    ),
]


@pytest.mark.parametrize(("name", "wrong", "message"), COMPRESS, ids=lambda value: str(value)[:40])
def test_compress_refuses_wrong_arguments_and_writes_nothing(name, wrong, message):
    args = arguments()
    args[name] = wrong()
    kept = {key: args[key].clone() for key in ("residual", "payload", "counters")}
    with pytest.raises((RuntimeError, ValueError)) as caught:
        ops.compress(
            args.pop("grad"),
            args["residual"],
            args.pop("layout"),
            args["payload"],
            **{key: args[key] for key in ("step", "scale", "threshold_factor", "counters")},
        )
    assert str(caught.value).startswith(message)
    for key, value in kept.items():
        assert torch.equal(args[key], value), f"{key} was written"


def test_compress_refuses_overlapping_memory():
    args = arguments()
    memory = torch.zeros(1500)
    with pytest.raises(
        RuntimeError, match="residual: expected memory of its own, got an overlap with grad"
    ):
        ops.compress(memory[:1000], memory[600:], args["layout"], args["payload"])


@pytest.mark.parametrize("foreign", [False, True], ids=["one storage", "views of foreign memory"])
@pytest.mark.parametrize(
    "pair", [("layout", "payload"), ("residual", "layout"), ("counters", "grad")]
)
def test_compress_refuses_overlaps_of_any_two_arguments(pair, foreign):
    args = arguments()
    memory = bytearray(8192)
    shared = torch.zeros(8192, dtype=torch.uint8)
    for name in pair:
        view = torch.frombuffer(memory, dtype=torch.uint8) if foreign else shared
        wanted = args[name]
        view = view[: wanted.numel() * wanted.element_size()].view(wanted.dtype).view(wanted.shape)
        args[name] = view.copy_(wanted) if name != "grad" else view
    if "layout" in pair:
        args["layout"].copy_(make_layout([900, 100], [50, None]))
    with pytest.raises(RuntimeError, match="expected memory of its own, got an overlap with"):
        ops.compress(
            args["grad"], args["residual"], args["layout"], args["payload"],
            counters=args["counters"],
        )  # fmt: skip


DECOMPRESS: list[tuple[str, Callable[[], Any], str]] = [
    (
        "payloads",
        lambda: torch.zeros(960, dtype=torch.uint8),
        "payloads: expected a contiguous 2-D",
    ),
    (
        "payloads",
        lambda: torch.zeros((0, 960), dtype=torch.uint8),
        "payloads: expected at least one",
    ),
    (
        "payloads",
        lambda: torch.zeros((2, 64), dtype=torch.uint8),
        "payloads: expected a capacity fro",
    ),
    (
        "payloads",
        lambda: torch.zeros((2, 968), dtype=torch.uint8),
        "payloads: expected a capacity th",
    ),
    ("payloads", lambda: torch.zeros((2, 960)), "payloads: expected dtype uint8, got Float"),
    ("grad", lambda: torch.zeros(999), "grad: expected the layout's 1000 elements, got 999"),
    (
        "grad",
        lambda: torch.zeros(NUMEL).double(),
        "grad: expected dtype float32, float16 or bfloat",
    ),
    (
        "status",
        lambda: torch.zeros(2).long(),
        "status: expected a contiguous int64 tensor of sizes",
    ),
    ("status", lambda: torch.zeros(1).int(), "status: expected a contiguous int64 tensor of sizes"),
    ("step", lambda: -5, "step: expected >= 0, got -5"),
]


@pytest.mark.parametrize(
    ("name", "wrong", "message"), DECOMPRESS, ids=lambda value: str(value)[:40]
)
def test_decompress_refuses_wrong_arguments_and_writes_nothing(name, wrong, message):
    args = arguments()
    ops.compress(args["grad"], args["residual"], args["layout"], args["payload"])
    given = {
        "payloads": args["payload"].view(1, -1),
        "grad": torch.full((NUMEL,), 5.0),
        "layout": args["layout"],
        "status": torch.zeros(1, dtype=torch.int64),
        "step": 0,
    }
    given[name] = wrong()
    grad = given["grad"].clone()
    with pytest.raises(RuntimeError) as caught:
        ops.decompress(**given)
    assert str(caught.value).startswith(message)
    assert torch.equal(given["grad"], grad)


def test_inspect_payload_refuses_what_is_too_short():
    layout = make_layout([1000], [50])
    with pytest.raises(RuntimeError, match="expected at least 32 bytes, got 31"):
        ops.inspect_payload(torch.zeros(31, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="expected at least the layout's 64 bytes, got 32"):
        ops.inspect_payload(torch.zeros(32, dtype=torch.uint8), layout)
    with pytest.raises(RuntimeError, match="expected a 1-D contiguous uint8 tensor"):
        ops.inspect_payload(torch.zeros(64))
