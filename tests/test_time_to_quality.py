"""Time to quality: what is made of curves and times, and a small run, stopped and resumed."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import network
import pytest
import time_to_quality
from quality_report import Curve, Times, marks, reached, reaches
from time_to_quality import Cell, Result, check_same_training

SCRIPT = Path(time_to_quality.__file__)
DENSE_BYTES = 4 * 946_625  # of the LSTM's gradients


# ---- curves and times ----------------------------------------------------------------------------


def curve(hook: str, *losses: float, length: int = 40, model: str = "lstm") -> Curve:
    every = length // (len(losses) - 1)
    points = [(i * every, i * every * 1000, loss) for i, loss in enumerate(losses)]
    return Curve(model, hook, 1, length, points)


def test_seconds_are_medians_of_ten_steps_except_the_first_ten():
    first, rest = [2.0] + 9 * [1.0], [*(9 * [0.5]), 60.0]
    clock = Times.of([first + 3 * rest])
    assert clock.blocks == [pytest.approx(1.1), 0.5, 0.5, 0.5]
    assert clock.until(0) == 0
    assert clock.until(20) == pytest.approx(11 + 5)
    assert clock.until(100) == pytest.approx(11 + 9 * 5)  # beyond the timed steps
    assert clock.until(25) == pytest.approx(11 + 5 + 2.5)
    slower = [2 * seconds for seconds in first + 3 * rest]
    assert Times.of([first + 3 * rest, slower]).step == pytest.approx(0.75)


def test_the_soonest_of_a_hooks_lengths_counts():
    dense = curve("allreduce", 4.0, 3.0, 2.5, 2.2, 2.0)
    short = curve("layer", 4.0, 3.5, 3.0, 2.4, 2.1)  # + 5 % at its last step
    long = curve("layer", 4.0, 3.4, 3.0, 2.05, 1.9, length=80)
    clocks = {
        ("lstm", "1gbit", "allreduce"): Times([0.4]),
        ("lstm", "1gbit", "layer"): Times([0.1]),
    }
    rows = {r.mark: r for r in reached([dense, short, long], clocks) if r.hook == "layer"}
    assert list(rows) == [name for name, _ in marks(dense)]
    final, within_5 = rows["dense's final"], rows["+ 5 %"]
    assert (final.length, final.step, final.quality) == (80, 80, 2.0)
    assert final.seconds == pytest.approx(8)
    assert final.times_faster == pytest.approx(16 / 8)
    assert (within_5.length, within_5.step) == (40, 40)
    assert within_5.times_faster == pytest.approx(16 / 4)
    assert (rows["dense's half-way"].length, rows["dense's half-way"].quality) == (40, 2.5)
    missed = [r for r in reached([dense, short], clocks) if r.mark == "dense's final"]
    assert [(r.hook, r.step, r.seconds) for r in missed] == [
        ("allreduce", 40, pytest.approx(16)),
        ("layer", None, None),
    ]


def test_accuracy_is_reached_from_below():
    points = [{"step": step, "quality": q} for step, q in ((0, 0.1), (10, 0.89), (20, 0.9))]
    worse = [{"step": 0, "quality": 0.1}, {"step": 20, "quality": 0.89}]
    assert reaches("cnn", points, points)
    assert not reaches("cnn", worse, points)
    assert reaches("lstm", worse, points)


def test_times_of_another_training_are_refused():
    timed = Cell("lstm", "1gbit", "layer", 1, 40, 20, 0)
    whole = replace(timed, network="unlimited", stop=40, every=20)
    points = [{"step": 20, "digest": "a"}, {"step": 40, "digest": "b"}]
    check_same_training(Result(timed, points=points[:1]), [Result(whole, points=points)])
    other = [{"step": 20, "digest": "c"}]
    with pytest.raises(ValueError, match="expected parameters a after 20 steps.*got c"):
        check_same_training(Result(timed, points=other), [Result(whole, points=points)])
    stretched = Result(replace(whole, length=80, stop=80), points=points)
    check_same_training(Result(timed, points=other), [stretched])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hooks", "layer"), "expected allreduce among them"),
        (("--stretch", "2"), "expected 1 and then rising numbers"),
        (("--timed-steps", "75"), "expected a multiple of --evaluate-every 50"),
        (("--networks", "slow"), "expected `unlimited` or a rate"),
        (("--steps", "0"), "expected more than 0"),
    ],
)
def test_bad_options_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        time_to_quality.parse_arguments(list(words))
    assert message in capsys.readouterr().err


# ---- a small run ---------------------------------------------------------------------------------

QUICK = ["--hooks", "allreduce", "layer", "--networks", "1gbit", "--stretch", "1"]
QUICK += ["--steps", "8", "--evaluate-every", "4", "--timed-steps", "4"]


@pytest.mark.usefixtures("can_build_networks")
def test_a_stopped_run_goes_on_and_fills_the_table(tmp_path):
    pytest.importorskip("matplotlib")
    words = [*QUICK, "--out", str(tmp_path)]
    cells = tmp_path / "cells"
    process = subprocess.Popen([sys.executable, str(SCRIPT), *words], start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not list(cells.glob("*.json")):
            assert process.poll() is None
            assert time.monotonic() < deadline, "no cell within 300 s"
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
    before = {path: path.stat().st_mtime_ns for path in cells.glob("*.json")}
    assert 0 < len(before) < 4

    time_to_quality.main(words)
    after = {path: path.stat().st_mtime_ns for path in cells.glob("*.json")}
    assert len(after) == 4  # two trainings, two times
    assert {path: after[path] for path in before} == before
    assert [name for name in network.namespaces() if f"-{os.getpid()}-" in name] == []

    with (tmp_path / "time_to_quality.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["hook"] for row in rows] == 4 * ["allreduce"] + 4 * ["layer"]
    dense, layer = rows[0], rows[4]
    assert (dense["mark"], dense["step"], dense["times_faster"]) == ("dense's final", "8", "1")
    assert float(dense["seconds"]) > 0
    assert layer["network"] == "1gbit"
    # One rank's ring all-reduce with its headers, and a payload in the first steps.
    sent, dense_sent = (float(row["wire_bytes_per_step"]) for row in (layer, dense))
    assert DENSE_BYTES < dense_sent < 1.1 * DENSE_BYTES
    assert 1000 < sent < DENSE_BYTES / 4
    with (tmp_path / "curves.csv").open() as file:
        points = list(csv.DictReader(file))
    assert [p["step"] for p in points] == 2 * ["0", "4", "8"]
    assert points[0]["quality"] == points[3]["quality"]  # the same parameters at the start
    assert float(points[2]["quality"]) < float(points[0]["quality"])
    assert (tmp_path / "time_to_quality_lstm.png").stat().st_size > 10_000

    # The times were taken in the same training, over a slower network: same bits after 4 steps.
    files = [json.loads(path.read_text()) for path in after]
    digests = {(f["cell"]["hook"], p["step"], p["digest"]) for f in files for p in f["points"]}
    assert len(digests) == 1 + 2 * 3 - 1  # step 0, 4 and 8 of two hooks; times add none
