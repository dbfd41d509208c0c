"""Payloads and residuals worked out by hand, byte for byte, for the ops and the reference."""

from __future__ import annotations

import struct
from types import ModuleType

import pytest
import torch
from torch import Tensor

from adacomp_torch import ops, reference
from adacomp_torch.layout import make_layout

FACTOR_2 = 0x40000000  # the float32 bits of 2.0


@pytest.fixture(params=[ops, reference], ids=["ops", "reference"])
def codec(request: pytest.FixtureRequest) -> ModuleType:
    return request.param


def fnv1a(*values: int) -> int:
    state = 2166136261
    for byte in struct.pack(f"<{len(values)}q", *values):
        state = (state ^ byte) * 16777619 % 2**32
    return state


def header(flags: int, layout_hash: int, step: int, needed: int, used: int) -> bytes:
    return b"ADC1" + struct.pack("<HHIIQQ", 1, flags, layout_hash, step, needed, used)


def compressed(
    codec: ModuleType, grad: Tensor, residual: Tensor, layout: Tensor, **options
) -> bytes:
    capacity = ops.payload_capacity(layout, scale=options.get("scale", "layer"))[1]
    payload = torch.full((capacity,), 0xFF, dtype=torch.uint8)
    codec.compress(grad, residual, layout, payload, **options)
    return bytes(payload.tolist())


def test_layer_scale_and_8_bit_entries(codec):
    # Bins [1, -4, 2, 0] and [3, -1]: maxima 4 and 3, s = 3.5. H = 2 dW passes at -4, 2; 3.
    layout = make_layout([6], [4])
    grad, residual = torch.tensor([1.0, -4, 2, 0, 3, -1]), torch.zeros(6)
    payload = compressed(codec, grad, residual, layout, step=2**32 + 5)
    assert payload == b"".join([
        header(0, fnv1a(1, 6, 4, 0, 0, FACTOR_2), 5, 68, 68),
        bytes.fromhex("00006040") + bytes(12),  # scale 3.5
        bytes.fromhex("00000000 04000000") + bytes(8),  # chunk table: one range of 4 bytes
        # index 1 negative; index 2 last; index 0 last; padding
        bytes([1 << 2 | 2, 2 << 2 | 1, 0 << 2 | 1, 0]),
        bytes(12),
    ])  # fmt: skip
    assert residual.tolist() == [1, -0.5, -1.5, 0, -0.5, -1]


def test_bin_scales_half_gradients_16_bit_entries_and_a_raw_segment(codec):
    # Maximum 2.0 has bits 0x40000000 >> 22 = 256, code 202, scale 2.5; 0.25 has 250, 196, 0.3125.
    layout = make_layout([2, 70], [None, 64])
    grad, residual = torch.zeros(72, dtype=torch.float16), torch.zeros(70)
    grad[:2] = torch.tensor([0.5, -2.0])
    grad[2 + 3], grad[2 + 63], grad[2 + 64 + 5] = 2.0, -1.5, -0.25
    payload = compressed(codec, grad, residual, layout, scale="bin")
    assert payload[:88] == b"".join([
        header(1, fnv1a(2, 2, 0, 70, 64, 1, 1, FACTOR_2), 0, 88, 88),
        bytes.fromhex("00000000 0000803f") + bytes(8),  # scales: 0 for raw, 1
        bytes.fromhex("00000000 08000000") + bytes(8),  # chunk table
        bytes.fromhex("0000003f 000000c0") + bytes(8),  # raw: 0.5, -2
        bytes([202, 196]),
        struct.pack("<HHH", 3 << 2, 63 << 2 | 3, 5 << 2 | 3),
    ])  # fmt: skip
    assert not any(payload[88:])
    expected = torch.zeros(70)
    expected[3], expected[63], expected[64 + 5] = 2 - 2.5, -1.5 + 2.5, -0.25 + 0.3125
    assert torch.equal(residual, expected)


def test_which_elements_are_sent_and_with_which_sign(codec):
    layout = make_layout([8], [2])
    residual = torch.tensor([4.0, 0, 0, 0, 1, -2, 3, 0])
    grad = torch.tensor([-1.0, 0.5, 0, 0, -1, 2.5, -2, 0])
    #     G = [3, 0.5,  0, 0,  0, 0.5,  1, 0], maxima 3, 0, 0.5, 1: s = 4.5 / 4 = 1.125
    #     H = [2, 1,    0, 0, -1, 3,   -1, 0]
    # bin 0: dW is against the sign of the largest G, nothing passes; bin 1: zeros send nothing;
    # bin 2: G = 0 passes the test on H but has no sign; bin 3: the sign is G's, not H's.
    payload = compressed(codec, grad, residual, layout)
    assert payload[64:68] == bytes([0xFD, 0xFD, 1 << 2 | 1, 0 << 2 | 1])
    assert residual.tolist() == [3, 0.5, 0, 0, 0, 0.5 - 1.125, 1 - 1.125, 0]


def test_a_bin_that_sends_nothing_among_16_bit_entries_and_among_bin_scales(codec):
    layout = make_layout([130], [65])
    grad = torch.zeros(130)
    grad[65] = -8.0
    payload = compressed(codec, grad, torch.zeros(130), layout)
    assert payload[32:36] == struct.pack("<f", 4.0)  # the mean over both bins
    assert payload[64:68] == struct.pack("<HH", 0xFFFD, 0 << 2 | 3)
    payload = compressed(codec, grad, torch.zeros(130), layout, scale="bin")
    assert payload[64:68] == bytes([0, 206]) + struct.pack("<H", 0 << 2 | 3)


@pytest.mark.parametrize("scale", ["layer", "bin"])
def test_a_zero_gradient_sends_nothing_and_keeps_the_residual(codec, scale):
    layout = make_layout([100], [10])
    residual = torch.randn(100)
    before = residual.clone()
    payload = compressed(codec, torch.zeros(100), residual, layout, scale=scale)
    assert payload[16:32] == struct.pack("<QQ", 64, 64)  # needed and used: no entries
    assert not any(payload[32:])
    assert torch.equal(residual, before)


@pytest.mark.parametrize("scale", ["layer", "bin"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_non_finite_element_keeps_its_residual_and_spoils_its_parameter_only(codec, value, scale):
    layout = make_layout([4, 4], [2, 2])
    residual, grad = torch.ones(8), torch.full((8,), 2.0)
    grad[1] = value
    payload = compressed(codec, grad, residual, layout, scale=scale)
    assert payload[32:36] == struct.pack("<I", 0x7FC00000)
    assert residual[:4].tolist() == [3, 1, 3, 3]
    assert residual[4:].abs().max() < 1
    out = torch.zeros(8)
    codec.decompress(
        torch.tensor(list(payload), dtype=torch.uint8).view(1, -1), out, layout, scale=scale
    )
    assert out.view(torch.int32)[:4].tolist() == [0x7FC00000] * 4
    assert torch.isfinite(out[4:]).all()


def test_scales_stay_within_half_precision(codec):
    layout = make_layout([2], [2])
    for value, sent in ((65504.0, 65504.0), (2.0**-24, 2.0**-24)):
        residual = torch.full((2,), value)  # G = 2 * value: beyond the largest half
        payload = compressed(codec, torch.full((2,), value).half(), residual, layout)
        scale = min(2 * sent, 65504.0)
        assert payload[32:36] == struct.pack("<f", scale)
        assert residual.tolist() == [2 * value - scale] * 2
    # A mean that rounds to 0 in half sends nothing.
    residual = torch.full((2,), -(2.0**-24) + 2.0**-40)
    payload = compressed(codec, torch.full((2,), 2.0**-24).half(), residual, layout)
    assert payload[32:36] == bytes(4)
    assert residual.tolist() == [2.0**-40] * 2


def test_decoding_takes_the_mean_over_the_ranks_in_order(codec):
    layout = make_layout([4, 1], [2, None])
    payloads = []
    for values in ([4.0, 0, 0, -4, 1], [2.0, 0, 2, 0, 2], [0.0, 0, 0, 0, 9]):
        grad = torch.tensor(values)
        payloads.append(list(compressed(codec, grad, torch.zeros(4), layout)))
    out = torch.full((5,), 7.0)
    codec.decompress(torch.tensor(payloads, dtype=torch.uint8), out, layout)
    expected = torch.tensor([6.0, 0, 2, -4, 12]) / torch.tensor(3.0)
    assert torch.equal(out, expected)
    codec.decompress(torch.tensor(payloads[:2], dtype=torch.uint8), out, layout)
    assert out.tolist() == [3, 0, 1, -2, 1.5]


def test_admission_starts_at_another_chunk_every_step(codec):
    # 3 chunks of 4096 one-element bins, 4096 bytes each; room for one. Step 1 starts at chunk
    # 2654435761 * 3 >> 32 = 1, step 2 at (2 * 2654435761 mod 2^32) * 3 >> 32 = 0.
    layout = make_layout([3 * 4096], [1])
    for step, first in ((0, 0), (1, 1), (2, 0), (3, 2)):
        payload = torch.full((64 + 4096 + 16,), 0xFF, dtype=torch.uint8)
        residual = torch.zeros(3 * 4096)
        codec.compress(torch.ones(3 * 4096), residual, layout, payload, step=step)
        kept = [float(chunk.max()) for chunk in residual.split(4096)]
        assert kept == [0.0 if chunk == first else 1.0 for chunk in range(3)], f"step {step}"
        table = struct.unpack_from("<4I", bytes(payload.tolist()), 48)
        assert table == tuple(4096 if chunk > first else 0 for chunk in range(4))
        assert struct.unpack_from("<QQ", bytes(payload.tolist()), 16) == (64 + 3 * 4096, 64 + 4096)
        assert not payload[-16:].any()


def test_the_probe_weighs_the_gradient_by_the_float32_factor_less_one(codec):
    # float32(1.1) - 1 is above float32(0.1): element 0 just reaches the maximum, element 1.
    weight = torch.tensor(1.1) - 1
    assert weight > torch.tensor(0.1)
    layout = make_layout([2], [2])
    residual = torch.tensor([-1 + 2.0**-20, 2.0**-20 + weight])
    grad = torch.tensor([1.0, 0])
    payload = compressed(codec, grad, residual, layout, threshold_factor=1.1)
    assert payload[64:66] == bytes([0 << 2, 1 << 2 | 1])


def test_the_mean_is_a_division_and_rounded_once(codec):
    layout = make_layout([1], [None])
    values = (1.0, 1.0, 3.0)  # 5 / 3 is not 5 * float32(1 / 3)
    payloads = [list(compressed(codec, torch.tensor([v]), torch.zeros(0), layout)) for v in values]
    out = torch.zeros(1)
    codec.decompress(torch.tensor(payloads, dtype=torch.uint8), out, layout)
    assert torch.equal(out, torch.tensor([5.0]) / torch.tensor([3.0]))
    assert not torch.equal(out, torch.tensor([5.0]) * (torch.tensor(1.0) / 3))
