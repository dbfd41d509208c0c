"""Malformed payloads: the fault is named, the whole bucket is NaN, nothing else is touched."""

from __future__ import annotations

import struct

import pytest
import torch
from buckets import SCALES
from torch import Tensor

from adacomp_torch import ops
from adacomp_torch.layout import make_layout

NUMELS, BIN_SIZES = [300, 5, 1200], [50, None, 500]
NUMEL = sum(NUMELS)
STEP = 7
# Offsets of this layout's parts: 3 segments, 1 + 1 chunks, 5 raw values.
SCALE_AT, TABLE, RAW_AT, ENTRIES = 32, 48, 64, 96


def good_payloads(scale: ops.Scale, world_size: int = 3) -> tuple[Tensor, Tensor]:
    layout = make_layout(NUMELS, BIN_SIZES)
    capacity = ops.payload_capacity(layout, scale=scale)[1]
    payloads = torch.empty((world_size, capacity), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for payload in payloads:
        grad, residual = torch.randn(NUMEL, generator=generator), torch.zeros(1500)
        ops.compress(grad, residual, layout, payload, step=STEP, scale=scale)
    return payloads, layout


def decode(payloads: Tensor, layout: Tensor, scale: ops.Scale) -> tuple[str, Tensor, int]:
    """Decodes into guarded memory; returns the error or "", the bucket and the status word."""
    memory = torch.full((NUMEL + 200,), 3.0)
    bucket = memory[100:-100]
    status = torch.zeros(1, dtype=torch.int64)
    error = ""
    try:
        ops.decompress(payloads, bucket, layout, step=STEP, scale=scale, status=status)
    except RuntimeError as raised:
        error = str(raised)
    assert (memory[:100] == 3.0).all()
    assert (memory[-100:] == 3.0).all()
    # A refusal is complete, and there is no other.
    assert bool(bucket.isnan().all()) == bool(error) == (int(status) != 0)
    return error, bucket, int(status)


def put(payload: Tensor, offset: int, form: str, value: float) -> None:
    data = struct.pack(form, value)
    payload[offset : offset + len(data)] = torch.tensor(list(data), dtype=torch.uint8)


def get(payload: Tensor, offset: int, form: str) -> int:
    return struct.unpack_from(form, bytes(payload.tolist()), offset)[0]


# name, what to do to the payload of rank 1, field in the message; for the layer scale
FAULTS = {
    "magic": (lambda p: put(p, 0, "<I", 0), "magic"),
    "version": (lambda p: put(p, 4, "<H", 2), "version: expected 1, got 2"),
    "flags": (lambda p: put(p, 6, "<H", 2), "flags: expected 0, got 2"),
    "other scale mode": (lambda p: put(p, 6, "<H", 1), "flags: expected 0, got 1"),
    "layout hash": (lambda p: put(p, 8, "<I", 5), "layout_hash"),
    "step": (lambda p: put(p, 12, "<I", 8), "step: expected 7, got 8"),
    "needed below fixed": (lambda p: put(p, 16, "<Q", 95), "needed_bytes"),
    "needed beyond worst": (lambda p: put(p, 16, "<Q", 2**40), "needed_bytes"),
    "used beyond needed": (lambda p: put(p, 24, "<Q", get(p, 16, "<Q") + 2), "used_bytes"),
    "used below fixed": (lambda p: put(p, 24, "<Q", 94), "used_bytes"),
    "negative scale": (lambda p: put(p, SCALE_AT, "<f", -1.0), "scale: expected 0, NaN or"),
    "infinite scale": (lambda p: put(p, SCALE_AT, "<f", float("inf")), "scale: expected 0, NaN"),
    "odd NaN scale": (lambda p: put(p, SCALE_AT, "<I", 0x7FC00001), "scale: expected 0, NaN or"),
    "scale of raw": (lambda p: put(p, SCALE_AT + 4, "<f", 1.0), "got 1 in segment 1"),
    "NaN scale of raw": (lambda p: put(p, SCALE_AT + 4, "<I", 0x7FC00000), "in segment 1"),
    "zero scale with entries": (lambda p: put(p, SCALE_AT, "<f", 0.0), "chunk table"),
    "table start": (lambda p: put(p, TABLE, "<I", 2), "chunk table"),
    "table end": (lambda p: put(p, TABLE + 8, "<I", get(p, TABLE + 8, "<I") - 2), "chunk table"),
    "table decreasing": (lambda p: put(p, TABLE + 4, "<I", 2**32 - 2), "chunk table"),
    "table odd": (lambda p: put(p, TABLE + 4, "<I", get(p, TABLE + 4, "<I") + 1), "chunk table"),
    "table moved": (lambda p: put(p, TABLE + 4, "<I", get(p, TABLE + 4, "<I") + 2), "bin count"),
    "scale padding": (lambda p: put(p, SCALE_AT + 12, "<B", 1), "padding"),
    "table padding": (lambda p: put(p, TABLE + 12, "<B", 1), "padding"),
    "raw padding": (lambda p: put(p, RAW_AT + 20, "<B", 1), "padding"),
    "tail": (lambda p: put(p, len(p) - 1, "<B", 1), "padding"),
    "index beyond the bin": (lambda p: put(p, ENTRIES, "<B", 50 << 2), "entry index"),
    "index not increasing": (lambda p: put(p, ENTRIES + 1, "<B", 0), "entry index"),
    "nothing after an entry": (lambda p: put(p, ENTRIES + 1, "<B", 0xFD), "entry index"),
    "nothing without last": (lambda p: put(p, ENTRIES, "<B", 0xFC), "entry index"),
    "negative nothing": (lambda p: put(p, ENTRIES, "<B", 0xFF), "entry index"),
}  # fmt: skip


BIN_FAULTS = {
    "scale 2": (lambda p: put(p, SCALE_AT, "<f", 2.0), "expected 0, NaN or 1, got 2"),
    "other scale mode": (lambda p: put(p, 6, "<H", 0), "flags: expected 1, got 0"),
    "a bin too few": (lambda p: put(p, ENTRIES, "<B", 0), "bin count"),
    "code padding": (lambda p: put(p, get(p, TABLE + 4, "<I") + ENTRIES + 3, "<B", 9), "padding"),
}  # fmt: skip


CASES = [("layer", name) for name in FAULTS] + [("bin", name) for name in BIN_FAULTS]


@pytest.mark.parametrize(("scale", "name"), CASES)
def test_a_fault_is_named_and_the_bucket_is_nan(scale, name):
    payloads, layout = good_payloads(scale)
    assert decode(payloads, layout, scale)[0] == ""
    damage, message = (FAULTS if scale == "layer" else BIN_FAULTS)[name]
    damage(payloads[1])
    error, bucket, status = decode(payloads, layout, scale)
    assert error.startswith("payload of rank 1: ")
    assert message in error
    assert bucket.isnan().all()
    assert status >> 40 == 1


def test_a_bin_code_below_the_range_of_half_is_refused():
    layout = make_layout([64], [64])
    capacity = ops.payload_capacity(layout, scale="bin")[1]
    payload = torch.empty((1, capacity), dtype=torch.uint8)
    grad = torch.randn(64).half()
    ops.compress(grad, torch.zeros(64), layout, payload[0], scale="bin")
    payload[0, ops.payload_capacity(layout)[0]] = 1  # 2^-99.4
    with pytest.raises(RuntimeError, match="bin code"):
        ops.decompress(payload, grad, layout, scale="bin")


def test_the_first_fault_stays_in_the_status_word():
    payloads, layout = good_payloads("layer")
    status = torch.zeros(1, dtype=torch.int64)
    words = []
    for rank in (2, 0):
        damaged = payloads.clone()
        damaged[rank, 0] = 0
        with pytest.raises(RuntimeError, match=f"rank {rank}"):
            ops.decompress(damaged, torch.zeros(NUMEL), layout, step=STEP, status=status)
        words.append(int(status))
    assert words[0] >> 40 == 2
    assert words[1] == words[0]


@pytest.mark.parametrize("scale", SCALES)
def test_every_single_bit_flip_is_refused_or_decodes_within_the_bucket(scale):
    """A flipped bit inside an entry or a scale can look right; it must never reach other memory."""
    payloads, layout = good_payloads(scale, world_size=1)
    used = ops.inspect_payload(payloads[0])["used_bytes"]
    refused = 0
    for bit in range(8 * min(used + 16, payloads.shape[1])):
        damaged = payloads.clone()
        damaged[0, bit // 8] ^= 1 << (bit % 8)
        refused += decode(damaged, layout, scale)[0] != ""
    assert refused > 8 * 32 // 2


@pytest.mark.parametrize("scale", SCALES)
def test_noise_after_a_good_header_is_refused_or_decodes_within_the_bucket(scale):
    payloads, layout = good_payloads(scale, world_size=1)
    generator = torch.Generator().manual_seed(0)
    refused = 0
    for _ in range(300):
        damaged = payloads.clone()
        start = int(torch.randint(32, damaged.shape[1], (), generator=generator))
        length = int(torch.randint(1, 64, (), generator=generator))
        window = damaged[0, start : start + length]
        window.copy_(torch.randint(256, (len(window),), generator=generator))
        refused += decode(damaged, layout, scale)[0] != ""
    assert refused > 100
