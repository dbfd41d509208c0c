"""The ops and the hook on a GPU: the CPU's bits, no waiting for the device, any stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from buckets import BIN_SIZES, DTYPES, GRADIENTS, SCALES, assert_same_bits, gradient, ugly_numels
from models import GivenGradients, assert_compressed, exact_gradients, hooked
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from adacomp_torch import AdaCompState, adacomp_hook, ops
from adacomp_torch.layout import make_layout

pytestmark = pytest.mark.needs_cuda


class Device:
    """One bucket's residual and payloads on a device."""

    def __init__(self, device: str, layout: Tensor, capacity: int, residual: int) -> None:
        self.device, self.layout = device, layout
        self.residual = torch.zeros(residual, device=device)
        self.payload = torch.full((capacity,), 0xFF, dtype=torch.uint8, device=device)
        self.counters = torch.zeros((len(layout), 2), dtype=torch.int64, device=device)

    def step(self, grad: Tensor, step: int, scale: ops.Scale) -> Tensor:
        options: dict[str, Any] = {"step": step, "scale": scale}
        grad = grad.to(self.device)
        ops.compress(
            grad, self.residual, self.layout, self.payload, counters=self.counters, **options
        )
        decoded = torch.full_like(grad, 7.0)
        ops.decompress(self.payload.repeat(2, 1), decoded, self.layout, **options)
        condition = torch.tensor([step % 2 == 0], device=self.device)
        ops.restore(
            self.payload, self.residual, self.layout, condition, dtype=grad.dtype, **options
        )
        return decoded


@pytest.mark.parametrize("room", [0.05, 1.0])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bin_size", BIN_SIZES)
def test_the_gpu_has_the_cpus_bits(bin_size, dtype, scale, room):
    numels = [*ugly_numels(bin_size), 100]
    layout = make_layout(numels, [bin_size] * (len(numels) - 1) + [None])
    fixed, worst_case = ops.payload_capacity(layout, scale=scale)
    capacity = fixed + int((worst_case - fixed) * room) // 16 * 16
    devices = [Device(d, layout, capacity, sum(numels) - 100) for d in ("cpu", "cuda")]
    generator = torch.Generator().manual_seed(bin_size)
    for step, kind in enumerate(GRADIENTS):
        grad = torch.cat([gradient(kind, n, dtype, generator) for n in numels])
        decoded = [device.step(grad, step, scale).cpu() for device in devices]
        assert torch.equal(devices[1].payload.cpu(), devices[0].payload), f"payload of {kind}"
        assert_same_bits(devices[1].residual.cpu(), devices[0].residual, f"residual of {kind}")
        assert_same_bits(decoded[1], decoded[0], f"decoded {kind}")
    assert torch.equal(devices[1].counters.cpu(), devices[0].counters)


def test_large_buckets_have_the_cpus_bits():
    numels, bins = [12_500_001, 3_000_000, 77], [50, 500, None]
    layout = make_layout(numels, bins)
    _, capacity = ops.payload_capacity(layout)
    devices = [Device(d, layout, capacity, sum(numels[:2])) for d in ("cpu", "cuda")]
    for step in range(3):
        grad = torch.randn(sum(numels), generator=torch.Generator().manual_seed(step))
        decoded = [device.step(grad, step, "layer").cpu() for device in devices]
        assert torch.equal(devices[1].payload.cpu(), devices[0].payload)
        assert_same_bits(decoded[1], decoded[0], "decoded")


def test_a_malformed_payload_sets_the_status_and_the_bucket_is_nan():
    layout = make_layout([10_000], [50])
    payload = torch.zeros(ops.payload_capacity(layout)[1], dtype=torch.uint8)
    ops.compress(torch.randn(10_000), torch.zeros(10_000), layout, payload)
    payload[ops.inspect_payload(payload)["used_bytes"] - 2] ^= 1
    statuses = []
    for device in ("cpu", "cuda"):
        grad = torch.zeros(10_000, device=device)
        status = torch.zeros(1, dtype=torch.int64, device=device)
        try:
            ops.decompress(payload.view(1, -1).to(device), grad, layout, status=status)
        except RuntimeError:
            assert device == "cpu"
        assert grad.isnan().all()
        statuses.append(int(status))
    assert statuses[0] == statuses[1] != 0


def round_trip(
    layout: Tensor, grad: Tensor, residual: Tensor, payload: Tensor, out: Tensor
) -> None:
    ops.compress(grad, residual, layout, payload)
    ops.decompress(payload.view(1, -1), out, layout)


def tensors(numel: int, layout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    capacity = ops.payload_capacity(layout)[1]
    payload = torch.zeros(capacity, dtype=torch.uint8, device="cuda")
    zeros = torch.zeros(2, numel, device="cuda")
    return torch.randn(numel, device="cuda"), zeros[0], payload, zeros[1]


def test_another_stream_and_no_synchronisation():
    layout = make_layout([1_000_003], [50])
    grad, residual, payload, out = tensors(1_000_003, layout)
    round_trip(layout, grad, residual, payload, out)  # uploads the tables
    again = tensors(1_000_003, layout)
    again[0].copy_(grad)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            round_trip(layout, *again)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(payload, again[2])
    assert torch.equal(out, again[3])


def test_compress_and_decompress_in_a_cuda_graph():
    layout = make_layout([100_000], [50])
    grad, residual, payload, out = tensors(100_000, layout)
    round_trip(layout, grad, residual, payload, out)
    residual.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        round_trip(layout, grad, residual, payload, out)
    residual.zero_()
    expected = torch.zeros(100_000)
    host = torch.zeros(payload.numel(), dtype=torch.uint8)
    for _ in range(3):
        graph.replay()
        ops.compress(grad.cpu(), expected, layout, host)
    assert torch.equal(residual.cpu(), expected)
    assert torch.equal(payload.cpu(), host)


def test_memory_is_bounded():
    numel = 50_000_000
    layout = make_layout([numel], [50])
    grad, residual, _, out = tensors(numel, layout)
    payload = torch.zeros(numel // 8 // 16 * 16, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        round_trip(layout, grad, residual, payload, out)
    assert torch.cuda.max_memory_allocated() - before < numel // 2  # an eighth of the gradient


# ---- the hook ------------------------------------------------------------------------------------


def nccl_steps(rank: int, steps: int, pressure: bool, fallback: float = 2.0) -> list[Tensor]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    group = dist.new_group(backend="nccl")
    module = GivenGradients().cuda()
    ddp, state = hooked(module, {"process_group": group}, dense_fallback=fallback)
    for step in range(steps):
        module.zero_grad()
        grads = [grad.cuda() for grad in exact_gradients(rank, step)]
        if step == 3:  # after the layouts' first exchanges
            torch.cuda.set_sync_debug_mode("error")
        loss = ddp(grads)
        loss.backward()
        torch.cuda.set_sync_debug_mode("default")
        if pressure:
            for size in (1 << 10, 1 << 16, 1 << 20):  # memory that was freed too early is reused
                torch.full((size + step,), float("nan"), device="cuda")
    if fallback == 2.0:
        assert_compressed(state)
    else:
        assert state.stats()["fallbacks"] > 0
    state.check()
    named = [state.residual(name).cpu() for name in ("first", "second", "third", "fourth")]
    return [*(p.grad.cpu() for p in module.parameters()), *named]


def cpu_steps(rank: int, steps: int, fallback: float) -> list[Tensor]:
    module = GivenGradients()
    ddp, state = hooked(module, dense_fallback=fallback)
    for step in range(steps):
        module.zero_grad()
        ddp(exact_gradients(rank, step)).backward()
    named = [state.residual(name).clone() for name in ("first", "second", "third", "fourth")]
    return [*(p.grad for p in module.parameters()), *named]


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


FALLBACKS = {"compressed": 2.0, "dense": 1e-3}


@pytest.mark.parametrize("fallback", FALLBACKS.values(), ids=FALLBACKS)
def test_nccl_with_one_rank_has_the_bits_of_gloo(fallback):
    nccl = run_ranks(nccl_steps, 1, 6, False, fallback)[0]
    assert_same(nccl, run_ranks(cpu_steps, 1, 6, fallback)[0])


@pytest.mark.needs_cuda(devices=2)
@pytest.mark.parametrize("fallback", FALLBACKS.values(), ids=FALLBACKS)
def test_nccl_with_two_ranks_has_the_bits_of_gloo(fallback):
    nccl = run_ranks(nccl_steps, 2, 6, False, fallback)
    gloo = run_ranks(cpu_steps, 2, 6, fallback)
    for first, second in zip(nccl, gloo, strict=True):
        assert_same(first, second)


def test_500_steps_under_allocator_pressure_have_the_bits_of_blocking_launches(
    monkeypatch, tmp_path
):
    asynchronous = run_ranks(nccl_steps, 1, 500, True)[0]
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    code = (
        f"TESTS = {str(Path(__file__).parent)!r}\n"
        "import sys, torch; sys.path.insert(0, TESTS); import test_cuda, ranks\n"
        "if __name__ == '__main__':\n"
        "    torch.save(ranks.run_ranks(test_cuda.nccl_steps, 1, 500, True)[0], sys.argv[1])\n"
    )
    script, result = tmp_path / "blocking.py", tmp_path / "blocking.pt"
    script.write_text(code)
    subprocess.run([sys.executable, script, result], check=True, timeout=300)
    assert_same(asynchronous, torch.load(result))


def scaled_steps(rank: int) -> float:
    torch.cuda.set_device(0)
    module = nn.Linear(512, 512).cuda()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**60, growth_interval=3)
    ddp = DistributedDataParallel(module, process_group=dist.new_group(backend="nccl"))
    state = AdaCompState(ddp, grad_scaler=scaler)
    ddp.register_comm_hook(state, adacomp_hook)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (ddp(torch.randn(64, 512, device="cuda")) - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert_compressed(state)
    assert all(bool(torch.isfinite(r).all()) for r in state.state_dict()["residuals"].values())
    return losses[-1] / losses[0]


def test_mixed_precision_with_a_scaler_that_overflows_at_first():
    assert run_ranks(scaled_steps, 1)[0] < 0.8
