"""Every instruction set's kernels give the reference's bits."""

from __future__ import annotations

import pytest
import torch
from buckets import BIN_SIZES, DTYPES, GRADIENTS, SCALES, Pair, gradient, ugly_numels

from adacomp_torch import _C

# Whatever the reference is tested with uses the fastest; the slower ones are tested here.
KERNELS = ["portable", "avx2", "avx512"]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest):
    if request.param not in _C.available_kernels():
        pytest.skip(f"this processor has not got {request.param}")
    before = _C.kernels()
    _C.set_kernels(request.param)
    yield request.param
    _C.set_kernels(before)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bin_size", [*BIN_SIZES, 7, 8, 9, 15, 16, 17, 71, 127, 128, 129])
def test_all_kernels_equal_the_reference_over_ugly_sizes(kernels, bin_size, dtype, scale):
    assert _C.kernels() == kernels
    numels = ugly_numels(bin_size)
    generator = torch.Generator().manual_seed(bin_size)
    pair = Pair(numels, [bin_size] * len(numels), dtype=dtype, scale=scale, world_size=1)
    for step in range(2):
        pair.step([gradient("normal", pair.numel, dtype, generator)], step)
    assert pair.counters[:, 0].sum() > 0


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_all_kernels_equal_the_reference_on_ugly_gradients(kernels, kind, dtype, scale):
    numels = [700, 3, 1000, 4096, 17, 513]
    generator = torch.Generator().manual_seed(5)
    pair = Pair(numels, [50, None, 500, 63, None, 64], dtype=dtype, scale=scale, world_size=3)
    for step in range(3):
        grads = [gradient(kind, pair.numel, dtype, generator) for _ in range(3)]
        pair.step(grads, step)


def test_the_slowest_kernels_are_portable_and_the_default_is_the_fastest():
    assert _C.available_kernels()[0] == "portable"
    assert _C.kernels() == _C.available_kernels()[-1]


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="kernels: expected one of .*portable.*, got sse9"):
        _C.set_kernels("sse9")
