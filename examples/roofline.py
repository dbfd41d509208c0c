"""Draws the codec's time per element against the size of the bucket, under its roof.

    python examples/roofline.py [--out docs/performance] [--repeats 15]

The roof is what memory allows at that size: for compress `residual.add_(grad)` (12 bytes per
element), for decompress `out.zero_()` (4 bytes per element), measured beside it on one core. Where
a bucket fits into a cache the distance to the roof is what the codec computes; where it does not,
what its passes over memory cost.
"""

import argparse
import csv
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from benchmark_ops import Case, median_seconds
from tqdm import tqdm

SIZES = [2**n for n in range(14, 24)] + [12_500_000, 25_000_000]
CPU = torch.device("cpu")
FIELDS = ("numel", "operation", "bin_size", "scale", "nanoseconds_per_element")


def measure(numel: int, repeats: int) -> list[dict[str, object]]:
    """Rows of one size: the two roofs, and each operation of each kind of bucket."""
    repeats = max(repeats, min(1000, 2**22 // numel))
    rows: list[dict[str, object]] = []

    def add(operation: str, bin_size: object, scale: str, seconds: float) -> None:
        values = (numel, operation, bin_size, scale, round(seconds * 1e9 / numel, 4))
        rows.append(dict(zip(FIELDS, values, strict=True)))

    residual, grad = torch.randn(numel), torch.randn(numel)
    add("add_", "", "", median_seconds(lambda: residual.add_(grad), repeats, CPU))
    add("zero_", "", "", median_seconds(residual.zero_, repeats, CPU))
    for bin_size in (50, 500):
        for scale in ("layer", "bin"):
            case = Case(numel, torch.float32, bin_size, scale, CPU)
            add("compress", bin_size, scale, median_seconds(case.compress, repeats, CPU))
            payloads = case.payload.repeat(2, 1)
            seconds = median_seconds(lambda: case.decompress(payloads), repeats, CPU)  # noqa: B023
            add("decompress of 2", bin_size, scale, seconds)
    return rows


def draw(rows: list[dict[str, object]], path: Path) -> None:
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharex=True)
    for panel, operation, roof in zip(
        panels, ("compress", "decompress of 2"), ("add_", "zero_"), strict=True
    ):
        for line in sorted({(r["operation"], r["bin_size"], r["scale"]) for r in rows}, key=str):
            if line[0] not in (operation, roof):
                continue
            points = [r for r in rows if (r["operation"], r["bin_size"], r["scale"]) == line]
            style = {"color": "black", "linewidth": 2} if line[0] == roof else {"marker": "."}
            label = (
                f"{roof} (memory)" if line[0] == roof else f"bin_size {line[1]}, {line[2]} scale"
            )
            panel.plot(
                [p["numel"] for p in points],
                [p["nanoseconds_per_element"] for p in points],
                label=label,
                **style,
            )
        panel.set(xscale="log", title=operation, xlabel="elements in the bucket", ylim=(0, None))
        panel.set_ylabel("ns per element, one core")
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("roofline"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [row for numel in tqdm(args.sizes) for row in measure(numel, args.repeats)]
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "roofline.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draw(rows, args.out / "roofline.png")
    print(f"{args.out / 'roofline.csv'} and {args.out / 'roofline.png'}")


if __name__ == "__main__":
    main()
