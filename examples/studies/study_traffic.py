"""Study 6: entries per bin and compression by parameter over the steps, and where bytes go.

    python examples/studies/study_traffic.py --data CIFAR10

Claim (section 4): more is sent in early epochs. Writes traffic_parameters.csv too, with a row for
each parameter and each other part of a payload.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import matplotlib.pyplot as plt
from figures import group_by, last_rows, number, ratio, tidy
from learners import AdaComp
from matplotlib.axes import Axes
from study import KEY, Row, Run, Setting, Study, append_rows, key_of_row, main, read_rows

from adacomp_torch import ops

PARTS_CSV = "traffic_parameters.csv"
# bytes: of the first learner's payload of this step. entries: sent by all learners so far.
PART_COLUMNS = ["step", "part", "elements", "bin_size", "entries", "bytes"]
HEADER = 32


def settings(seed: int) -> list[Setting]:
    cnn = Setting("cifar16", steps=1500, seed=seed)
    mlp = Setting("mlp14", batch=32, lr=0.05, steps=800, seed=seed)
    lstm = Setting("lstm", batch=4, steps=800, optimizer="adam", lr=4e-3, seed=seed)
    both = [replace(s, scale=scale) for s in (cnn, mlp, lstm) for scale in ("layer", "bin")]
    return both[::2] + both[1::2]


def at_row(run: Run, step: int, folder: Path) -> None:
    """Appends a row for every part of a payload."""
    if run.adacomp is None:
        return
    rows = [{**asdict(run.setting), "step": step, **part} for part in parts_of_payload(run.adacomp)]
    append_rows(folder / PARTS_CSV, [*KEY, *PART_COLUMNS], rows)


def parts_of_payload(adacomp: AdaComp) -> list[dict[str, object]]:
    """Header, scales, chunk table, raw values (padding included) and each parameter's entries.

    With bin scales the code bytes, one per bin, are among the entries.
    """
    payload, layout = adacomp.payloads[0], adacomp.layout
    found = ops.inspect_payload(payload, layout)
    table = found["chunk_table"]
    sizes = adacomp.bin_sizes
    scales = _padded(4 * len(sizes))
    chunks = _padded(4 * len(table))
    raw = adacomp.fixed - HEADER - scales - chunks
    parts: list[dict[str, object]] = [
        {"part": "header", "bytes": HEADER},
        {"part": "scales", "bytes": scales},
        {"part": "chunk table", "bytes": chunks},
        {"part": "raw", "bytes": raw},
    ]
    sent = adacomp.counters[:, :, 0].sum(0).tolist()
    chunk = 0
    for name, numel, size, entries in zip(adacomp.names, adacomp.numels, sizes, sent, strict=True):
        if size is None:
            continue
        bins, per_chunk = -(-numel // size), max(1, 4096 // size)
        end = chunk + -(-bins // per_chunk)
        part = {"part": name, "elements": numel, "bin_size": size, "entries": entries}
        parts.append({**part, "bytes": table[end] - table[chunk]})
        chunk = end
    return parts


def _padded(count: int) -> int:
    return -(-count // 16) * 16


def setup_of(row: Row) -> str:
    return f"{row['task']}, {row['scale']} scale"


def draw(rows: list[Row], path: Path) -> None:
    wanted = {key_of_row(row) for row in rows}
    parts = [row for row in read_rows(path.parent / PARTS_CSV) if key_of_row(row) in wanted]
    setups = group_by(parts, setup_of)
    figure, axes = plt.subplots(2, len(setups), figsize=(3.4 * len(setups), 6.6), squeeze=False)
    for (entries, share), (setup, inside) in zip(axes.T, setups.items(), strict=True):
        _draw_entries(entries, [row for row in inside if row["bin_size"]])
        entries.set_title(setup, fontsize=9)
        last = max(int(row["step"]) for row in inside)
        final = [row for row in inside if int(row["step"]) == last]
        share.barh([row["part"] for row in final], [number(row, "bytes") for row in final])
        share.set_xlabel("bytes of a payload, last step")
        share.tick_params(axis="y", labelsize=6)
        share.invert_yaxis()
        tidy(share)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def _draw_entries(axes: Axes, rows: list[Row]) -> None:
    for name, inside in group_by(rows, lambda row: row["part"]).items():
        steps = [0, *(int(row["step"]) for row in inside)]
        entries = [0, *(int(row["entries"]) for row in inside)]
        bins = -(-int(inside[0]["elements"]) // int(inside[0]["bin_size"]))
        per_step = bins * int(inside[0]["learners"])
        means = [
            (entries[i] - entries[i - 1]) / (steps[i] - steps[i - 1]) / per_step
            for i in range(1, len(steps))
        ]
        axes.plot(steps[1:], means, label=name)
    axes.set_ylabel("entries per bin")
    axes.set_xlabel("steps")
    axes.legend(fontsize=5)
    tidy(axes)


def finding(rows: list[Row]) -> str:
    results = []
    for setup, inside in group_by(rows, setup_of).items():
        first, last = inside[0], last_rows(inside)[0]
        results.append(
            f"{setup}: {number(first, 'entries_per_bin'):.2f} entries per bin until step "
            f"{first['step']}, {number(last, 'entries_per_bin'):.2f} at the end "
            f"({ratio([last], 'needed_bytes'):.0f}x needed, {ratio([last]):.0f}x sent)"
        )
    return "; ".join(results) + "."


STUDY = Study("traffic", settings, draw, finding, evaluations=20, at_row=at_row)

if __name__ == "__main__":
    main(STUDY, __doc__)
