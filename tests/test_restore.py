"""`ops.restore`: putting back what was sent in a step that is discarded."""

from __future__ import annotations

import pytest
import torch
from buckets import BIN_SIZES, DTYPES, SCALES, assert_same_bits, gradient, ugly_numels
from torch import Tensor

from adacomp_torch import ops, reference
from adacomp_torch.layout import make_layout

ALWAYS = torch.ones(1, dtype=torch.bool)


class Sent:
    """A bucket with residuals, compressed once into a payload with `room` for its entries."""

    def __init__(self, bin_size: int, dtype: torch.dtype, scale: ops.Scale, room: float) -> None:
        numels = [*ugly_numels(bin_size), 100]
        bin_sizes: list[int | None] = [bin_size] * (len(numels) - 1) + [None]
        generator = torch.Generator().manual_seed(bin_size)
        self.layout = make_layout(numels, bin_sizes)
        self.grad = torch.cat([gradient("normal", n, dtype, generator) for n in numels])
        self.before = torch.randn(sum(numels) - 100, generator=generator)
        self.residual = self.before.clone()
        self.options = {"step": 5, "scale": scale}
        fixed, worst_case = ops.payload_capacity(self.layout, scale=scale)
        capacity = fixed + int((worst_case - fixed) * room) // 16 * 16
        self.payload = torch.zeros(capacity, dtype=torch.uint8)
        ops.compress(self.grad, self.residual, self.layout, self.payload, **self.options)

    def restore(self, condition: Tensor = ALWAYS) -> None:
        dtype = self.grad.dtype
        ops.restore(
            self.payload, self.residual, self.layout, condition, dtype=dtype, **self.options
        )


@pytest.mark.parametrize("room", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bin_size", BIN_SIZES)
def test_restore_adds_exactly_what_this_rank_would_decode_alone(bin_size, dtype, scale, room):
    sent = Sent(bin_size, dtype, scale, room)
    own = torch.empty_like(sent.grad)
    reference.decompress(sent.payload.view(1, -1), own, sent.layout, **sent.options)
    expected = sent.residual + own[: sent.residual.numel()].float()
    sent.restore()
    assert_same_bits(sent.residual, expected, "residual")
    exact = sent.before + sent.grad[: sent.before.numel()].float()
    assert torch.allclose(sent.residual, exact, rtol=1e-6, atol=1e-6)
    assert own.count_nonzero() > 0 or room == 0.0


def test_restore_does_nothing_unless_the_condition_holds():
    sent = Sent(50, torch.float32, "layer", 1.0)
    after = sent.residual.clone()
    sent.restore(torch.zeros(1, dtype=torch.bool))
    assert torch.equal(sent.residual, after)


def test_a_parameter_that_was_not_finite_gets_nothing_back():
    grad, residual = torch.ones(100), torch.zeros(100)
    grad[7] = float("nan")
    layout = make_layout([100], [50])
    payload = torch.zeros(ops.payload_capacity(layout)[1], dtype=torch.uint8)
    ops.compress(grad, residual, layout, payload)
    after = residual.clone()
    ops.restore(payload, residual, layout, ALWAYS, dtype=torch.float32)
    assert torch.equal(residual, after)


def test_a_malformed_payload_is_refused_and_nothing_is_added():
    sent = Sent(50, torch.float32, "layer", 1.0)
    after = sent.residual.clone()
    used = ops.inspect_payload(sent.payload)["used_bytes"]
    sent.payload[used - 2] ^= 1  # the last chunk: those before it are right
    with pytest.raises(RuntimeError, match="payload of rank 0: .*, got something else in chunk"):
        sent.restore()
    assert torch.equal(sent.residual, after)


WRONG = {
    "condition dtype": ({"condition": torch.ones(1)}, "condition: expected a contiguous bool"),
    "condition size": (
        {"condition": torch.ones(2, dtype=torch.bool)},
        "condition: expected a contiguous bool tensor of sizes [1]",
    ),
    "dtype": ({"dtype": torch.float64}, "dtype: expected dtype float32, float16 or bfloat16"),
    "residual": ({"residual": torch.zeros(99)}, "residual: expected room for 100 elements"),
    "payload": (
        {"payload": torch.zeros(16, dtype=torch.uint8)},
        "payload: expected a capacity from 64 to",
    ),
    "step": ({"step": -1}, "step: expected >= 0, got -1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_restore_refuses_wrong_arguments(what):
    layout = make_layout([100], [50])
    capacity = ops.payload_capacity(layout)[1]
    change, message = WRONG[what]
    arguments = {
        "payload": torch.zeros(capacity, dtype=torch.uint8),
        "residual": torch.zeros(100),
        "layout": layout,
        "condition": ALWAYS,
        "dtype": torch.float32,
        "step": 0,
        **change,
    }
    with pytest.raises(RuntimeError) as caught:
        ops.restore(**arguments)
    assert message in str(caught.value)


def test_opcheck():
    sent = Sent(50, torch.float32, "layer", 1.0)
    torch.library.opcheck(
        torch.ops.adacomp.restore,
        (sent.payload, sent.residual, sent.layout, ALWAYS, torch.float32, 5, False, 2.0),
    )
