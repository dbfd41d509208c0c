"""Times compress and decompress against the memory operations that bound them, in one process.

    python examples/benchmark_ops.py [--numel 12500000] [--threads 1] [--repeats 15]

compress is compared with `residual.add_(grad)` (12 bytes per element) and decompress with
`out.zero_()` of a touched tensor (4 bytes per element); the figures are ratios of medians. Capacity
is that of the steady state: 1.25 x the entries of a typical step.
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


def median_seconds(function: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


class Case:
    """One dtype, bin size and scale mode in its steady state."""

    def __init__(self, numel: int, dtype: torch.dtype, bin_size: int, scale: ops.Scale) -> None:
        self.scale = scale
        self.pool = torch.randn(numel + SHIFTS).to(dtype)
        self.layout = make_layout([numel], [bin_size])
        self.residual = torch.zeros(numel)
        self.step = 0
        self.fixed, worst_case = ops.payload_capacity(self.layout, scale=scale)
        self.payload = torch.zeros(worst_case, dtype=torch.uint8)
        for _ in range(WARM_UP):
            self.compress()
        entries = ops.inspect_payload(self.payload)["used_bytes"] - self.fixed
        capacity = self.fixed + (5 * entries // 4 + 15) // 16 * 16
        self.payload = torch.zeros(capacity, dtype=torch.uint8)
        self.compress()
        self.out = torch.zeros(numel, dtype=dtype)

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

    def ratio(self) -> float:
        used: int = ops.inspect_payload(self.payload)["used_bytes"]
        return self.out.numel() * self.out.element_size() / used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=12_500_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)

    print(f"{args.numel} elements, {args.threads} thread(s), medians of {args.repeats}")
    print(
        "dtype     bin  scale  ratio  compress/add_  2 payloads/zero_  8 payloads/zero_   add_ ms"
    )
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for bin_size in (50, 500):
            for scale in ("layer", "bin"):
                case = Case(args.numel, dtype, bin_size, scale)
                residual, grad = torch.zeros(args.numel), torch.randn(args.numel)
                touched = torch.ones(args.numel)
                # The yardsticks are timed right beside what they measure: machines drift.
                add = median_seconds(lambda: residual.add_(grad), args.repeats)  # noqa: B023
                compress = median_seconds(case.compress, args.repeats)
                zero = median_seconds(touched.zero_, args.repeats)
                decompress = {}
                for ranks in (2, 8):
                    payloads = case.payload.repeat(ranks, 1)
                    decompress[ranks] = median_seconds(
                        lambda: case.decompress(payloads),  # noqa: B023
                        args.repeats,
                    )
                print(
                    f"{str(dtype)[6:]:9} {bin_size:3}  {scale:5} {case.ratio():6.1f} "
                    f"{compress / add:14.2f} {decompress[2] / zero:17.2f} "
                    f"{decompress[8] / zero:17.2f} {1e3 * add:9.1f}"
                )


if __name__ == "__main__":
    main()
