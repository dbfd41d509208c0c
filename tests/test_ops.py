"""The ops against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from buckets import (
    BIN_SIZES,
    DTYPES,
    GRADIENTS,
    SCALES,
    Pair,
    assert_same_bits,
    gradient,
    ugly_numels,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from adacomp_torch import _C, ops
from adacomp_torch.layout import make_layout


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bin_size", BIN_SIZES)
def test_ops_equal_the_reference_over_ugly_sizes(bin_size, dtype, scale, threads):
    numels = ugly_numels(bin_size)
    generator = torch.Generator().manual_seed(bin_size)
    pair = Pair(numels, [bin_size] * len(numels), dtype=dtype, scale=scale, world_size=2)
    for step in range(3):
        pair.step([gradient("normal", pair.numel, dtype, generator) for _ in range(2)], step)
    assert pair.counters[:, 0].sum() > 0
    assert pair.counters[:, 1].sum() == 0


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", GRADIENTS)
def test_ops_equal_the_reference_on_ugly_gradients(kind, dtype, scale):
    numels = [700, 3, 1000, 0, 4096, 17, 513]
    bin_sizes = [50, None, 500, 50, 63, None, 64]
    generator = torch.Generator().manual_seed(1)
    pair = Pair(numels, bin_sizes, dtype=dtype, scale=scale, world_size=3)
    for step, kind_now in enumerate(["normal", kind, kind, "normal", kind]):
        grads = [
            torch.cat([gradient(kind_now, n, dtype, generator) for n in numels]) for _ in range(3)
        ]
        pair.step(grads, step)
    for residual in pair.residuals["ops"]:
        assert torch.isfinite(residual).all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("room", [0.0, 0.003, 0.03, 0.1])
def test_ops_equal_the_reference_when_chunks_are_dropped(room, scale):
    generator = torch.Generator().manual_seed(2)
    pair = Pair([20_000, 5, 9_000], [50, None, 500], scale=scale, room=room)
    for step in range(6):
        pair.step(
            [gradient("normal", pair.numel, torch.float32, generator) for _ in range(2)], step
        )
    assert pair.counters[:, 1].sum() > 0


@pytest.mark.parametrize("factor", [1.0, 1.5, 3.0, 1e38])
def test_ops_equal_the_reference_for_other_threshold_factors(factor):
    generator = torch.Generator().manual_seed(3)
    pair = Pair([3000, 3000], [50, 500], threshold_factor=factor)
    for step in range(3):
        pair.step([gradient("normal", 6000, torch.float32, generator) for _ in range(2)], step)


@pytest.mark.parametrize("shift", range(1, 8))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_and_residuals_may_start_anywhere(shift, dtype):
    layout = make_layout([1237, shift, 611], [50, None, 500])
    fixed, capacity = ops.payload_capacity(layout)
    grad = torch.randn(1848 + 2 * shift).to(dtype)[shift:][: 1848 + shift]
    aligned, shifted = torch.zeros(1848), torch.zeros(1848 + shift)[shift:]
    payloads = torch.empty((2, capacity), dtype=torch.uint8)
    ops.compress(grad.clone(), aligned, layout, payloads[0])
    ops.compress(grad, shifted, layout, payloads[1])
    assert torch.equal(payloads[0], payloads[1])
    assert ops.inspect_payload(payloads[0])["used_bytes"] > fixed
    assert_same_bits(shifted, aligned, "residual")
    out = torch.zeros(1849 + shift, dtype=dtype)[1:]
    expected = torch.zeros(1848 + shift, dtype=dtype)
    ops.decompress(payloads, out, layout)
    ops.decompress(payloads, expected, layout)
    assert_same_bits(out, expected, "decoded gradient")


@pytest.mark.parametrize("scale", SCALES)
def test_every_thread_count_gives_the_same_bits(scale):
    layout = make_layout([300_000, 70_000], [50, 500])
    capacity = ops.payload_capacity(layout, scale=scale)[1]
    grad = torch.randn(370_000)
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        assert _C.parallel_threads() == threads
        residual, payload = torch.zeros(370_000), torch.empty((1, capacity), dtype=torch.uint8)
        out = torch.empty(370_000)
        ops.compress(grad, residual, layout, payload[0], scale=scale)
        ops.decompress(payload, out, layout, scale=scale)
        results.append((residual, payload, out))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


def test_indices_do_not_wrap_in_a_long_half_tensor_with_its_only_values_at_the_end():
    # Fault 31: indices kept in too narrow a type.
    layout = make_layout([70_000], [16383])
    capacity = ops.payload_capacity(layout)[1]
    grad = torch.zeros(70_000, dtype=torch.float16)
    grad[-3:] = torch.tensor([1.0, -2.0, 2.0])
    residual, payload = torch.zeros(70_000), torch.empty((1, capacity), dtype=torch.uint8)
    ops.compress(grad, residual, layout, payload[0])
    out = torch.ones(70_000, dtype=torch.float16)
    ops.decompress(payload, out, layout)
    # Bins of zeros count in the mean: 2 over 5 bins, rounded to half.
    scale = torch.tensor(0.4).half().item()
    assert out[:-3].abs().max() == 0
    assert out[-3:].tolist() == [scale, -scale, scale]
    assert torch.equal(residual[-3:] + out[-3:].float(), grad[-3:].float())


def test_needed_bytes_grow_by_what_is_dropped_and_a_dropped_chunk_keeps_exactly_g():
    layout = make_layout([8192], [64])
    fixed, capacity = ops.payload_capacity(layout)
    grad, start = torch.randn(8192), torch.randn(8192)
    all_residual, none_residual = start.clone(), start.clone()
    complete = torch.empty(capacity, dtype=torch.uint8)
    none = torch.empty(fixed, dtype=torch.uint8)
    ops.compress(grad, all_residual, layout, complete)
    ops.compress(grad, none_residual, layout, none)
    sent, dropped = ops.inspect_payload(complete), ops.inspect_payload(none)
    assert dropped["needed_bytes"] == sent["needed_bytes"] == sent["used_bytes"] > fixed
    assert dropped["used_bytes"] == fixed
    assert torch.equal(none_residual, start + grad)
    assert not torch.equal(all_residual, none_residual)


def test_no_chunk_starves_when_the_room_is_for_one():
    numels, layout = [4096 * 5], make_layout([4096 * 5], [64])
    fixed, _ = ops.payload_capacity(layout)
    residual = torch.zeros(numels[0])
    seen = set()
    for step in range(40):
        payload = torch.empty(fixed + 2400, dtype=torch.uint8)
        ops.compress(torch.randn(numels[0]), residual, layout, payload, step=step)
        table = ops.inspect_payload(payload, layout)["chunk_table"]
        seen |= {i for i in range(5) if table[i] < table[i + 1]}
    assert seen == set(range(5))


@settings(max_examples=60, deadline=None)
@given(
    segments=st.lists(
        st.tuples(st.integers(0, 700), st.one_of(st.none(), st.integers(1, 130))), max_size=5
    ),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from(SCALES),
    kind=st.sampled_from(GRADIENTS),
    room=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_ops_equal_the_reference_for_any_layout(segments, dtype, scale, kind, room, seed):
    generator = torch.Generator().manual_seed(seed)
    numels, bin_sizes = [n for n, _ in segments], [b for _, b in segments]
    pair = Pair(numels, bin_sizes, dtype=dtype, scale=scale, room=room)
    for step in (seed, seed + 1):
        pair.step([gradient(kind, pair.numel, dtype, generator) for _ in range(2)], step)


# ---- contracts of registered ops -----------------------------------------------------------------


@pytest.mark.parametrize("bin_scales", [False, True])
@pytest.mark.parametrize("with_counters", [False, True])
def test_opcheck(bin_scales, with_counters):
    layout = make_layout([300, 7, 200], [50, None, 64])
    grad, residual = torch.randn(507), torch.zeros(500)
    capacity = int(torch.ops.adacomp.payload_capacity(layout, bin_scales)[1])
    payload = torch.zeros(capacity, dtype=torch.uint8)
    counters = torch.zeros((3, 2), dtype=torch.int64) if with_counters else None
    torch.library.opcheck(torch.ops.adacomp.payload_capacity, (layout, bin_scales))
    arguments = (grad, residual, layout, payload, counters, 3, bin_scales, 2.0)
    torch.library.opcheck(torch.ops.adacomp.compress, arguments)
    torch.ops.adacomp.compress(*arguments)
    status = torch.zeros(1, dtype=torch.int64)
    torch.library.opcheck(
        torch.ops.adacomp.decompress,
        (payload.view(1, -1), torch.zeros(507), layout, status, 3, bin_scales, 2.0),
    )


def test_ops_compile_without_graph_breaks():
    layout = make_layout([1000], [50])
    capacity = ops.payload_capacity(layout)[1]

    def round_trip(grad, residual, payload, out):
        ops.compress(grad, residual, layout, payload)
        ops.decompress(payload.view(1, -1), out, layout)
        return out * 2

    grad = torch.randn(1000)
    results = []
    compiled = torch.compile(round_trip, backend="aot_eager", fullgraph=True)
    for function in (round_trip, compiled):
        residual, out = torch.zeros(1000), torch.zeros(1000)
        doubled = function(grad, residual, torch.zeros(capacity, dtype=torch.uint8), out)
        results.append((residual, out, doubled))
    assert results[0][1].count_nonzero() > 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_cuda_tensor_on_a_cpu_only_build_has_a_kernel_that_says_so():
    import adacomp_torch

    if adacomp_torch.has_cuda:
        pytest.skip("this build has the CUDA kernels")
    for op in ("compress", "decompress", "payload_capacity", "restore"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"adacomp::{op}", "CUDA")
