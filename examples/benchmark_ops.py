"""Times compress and decompress against the memory operations that bound them, in one process.

    python examples/benchmark_ops.py [--numel 12500000] [--threads 1] [--repeats 15]
    python examples/benchmark_ops.py --device cuda --numel 12500000 100000000 400000000 --kernels

On the CPU compress is compared with `residual.add_(grad)` (12 bytes per element) and decompress
with `out.zero_()` of a touched tensor (4 bytes per element). On a GPU compress is compared with 12
bytes per element, and decompress with 4 bytes per element and the payloads, at the bandwidth of a
device copy. The figures are ratios of medians. Capacity is that of a steady state with some room:
1.25 x the entries of a typical step.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from adacomp_torch import ops
from adacomp_torch.layout import make_layout

SHIFTS = 100_000  # a gradient is a window of one random pool, at a random place
WARM_UP = 40  # steps until the residuals' distribution is steady


def median_seconds(function: Callable[[], object], repeats: int, device: torch.device) -> float:
    seconds: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class Case:
    """One dtype, bin size and scale mode in its steady state."""

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        bin_size: int,
        scale: ops.Scale,
        device: torch.device,
    ) -> None:
        self.scale = scale
        self.pool = torch.randn(numel + SHIFTS, device=device).to(dtype)
        self.layout = make_layout([numel], [bin_size])
        self.residual = torch.zeros(numel, device=device)
        self.step = 0
        self.fixed, worst_case = ops.payload_capacity(self.layout, scale=scale)
        worst_case = min(worst_case, 2**32 - 16)
        self.payload = torch.zeros(worst_case, dtype=torch.uint8, device=device)
        for _ in range(WARM_UP):
            self.compress()
        capacity = self.fixed + (5 * (self.used_bytes() - self.fixed) // 4 + 15) // 16 * 16
        self.payload = torch.zeros(capacity, dtype=torch.uint8, device=device)
        self.compress()
        self.out = torch.zeros(numel, dtype=dtype, device=device)

    def compress(self) -> None:
        self.step += 1
        shift = int(torch.randint(SHIFTS, ()))
        ops.compress(
            self.pool[shift:][: self.residual.numel()],
            self.residual,
            self.layout,
            self.payload,
            step=self.step,
            scale=self.scale,
        )

    def decompress(self, payloads: Tensor) -> None:
        ops.decompress(payloads, self.out, self.layout, step=self.step, scale=self.scale)

    def used_bytes(self) -> int:
        used: int = ops.inspect_payload(self.payload.cpu())["used_bytes"]
        return used

    def ratio(self) -> float:
        return self.out.numel() * self.out.element_size() / self.used_bytes()


def yardsticks(
    case: Case, ranks: int, repeats: int, device: torch.device
) -> tuple[float, float, float]:
    """Seconds of what bounds compress and decompress, and the bytes per second behind them."""
    numel = case.out.numel()
    grad, touched = torch.randn(numel, device=device), torch.ones(numel, device=device)
    if device.type == "cpu":
        add = median_seconds(lambda: touched.add_(grad), repeats, device)
        return add, median_seconds(touched.zero_, repeats, device), 12 * numel / add
    copy = 8 * numel / median_seconds(lambda: touched.copy_(grad), repeats, device)
    decoded = case.out.element_size() * numel + ranks * case.payload.numel()
    moved = (8 + case.out.element_size()) * numel
    return moved / copy, decoded / copy, copy


def report(case: Case, repeats: int, device: torch.device) -> str:
    # The yardsticks are timed right beside what they measure: machines drift.
    compress = median_seconds(case.compress, repeats, device)
    add, _, bandwidth = yardsticks(case, 2, repeats, device)
    decompress = []
    for ranks in (2, 8):
        payloads = case.payload.repeat(ranks, 1)
        seconds = median_seconds(lambda: case.decompress(payloads), repeats, device)  # noqa: B023
        decompress.append(seconds / yardsticks(case, ranks, repeats, device)[1])
    return (
        f"{case.ratio():6.1f} {compress / add:14.2f} {decompress[0]:17.2f} {decompress[1]:17.2f} "
        f"{bandwidth / 1e9:9.1f}"
    )


def print_kernels(case: Case) -> None:
    """Device time of each kernel, from the profiler."""
    payloads = case.payload.repeat(8, 1)
    with torch.profiler.profile() as profile:
        for _ in range(10):
            case.compress()
            case.decompress(payloads)
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, nargs="+", default=[12_500_000])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--kernels", action="store_true", help="with cuda: time of each kernel")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{args.threads} thread(s)"
    bounds = ("add_", "zero_") if args.device == "cpu" else ("bound", "bound")
    for numel in args.numel:
        print(f"{numel:,} elements, {where}, medians of {args.repeats}")
        print(
            f"dtype     bin  scale  ratio  compress/{bounds[0]:5} 2 payloads/{bounds[1]:5}  "
            f"8 payloads/{bounds[1]:5}      GB/s"
        )
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for bin_size in (50, 500):
                for scale in ("layer", "bin"):
                    case = Case(numel, dtype, bin_size, scale, device)
                    line = report(case, args.repeats, device)
                    print(f"{str(dtype)[6:]:9} {bin_size:3}  {scale:5} {line}", flush=True)
        if args.kernels and args.device == "cuda":
            print_kernels(Case(numel, torch.float32, 50, "layer", device))


if __name__ == "__main__":
    main()
