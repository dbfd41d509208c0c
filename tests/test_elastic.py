"""The checkpoint example under torchrun: killed workers, restarts, other numbers of ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "train_resumable.py"
# Bins of one element need the same bytes in every step: no chunk is dropped, a resume is bit-equal.
ARGUMENTS = ("--bin-size", "1")


def start(folder: Path, ranks: int, *arguments: str) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", "--max-restarts=1", str(EXAMPLE)),
        *("--folder", str(folder), *ARGUMENTS, *arguments),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(folder: Path, ranks: int, *arguments: str) -> str:
    process = start(folder, ranks, *arguments)
    try:
        text, _ = process.communicate(timeout=120)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, text
    return text


def outcome(text: str) -> tuple[float, str]:
    """Loss and digest of the parameters, which every rank has agreed on."""
    found = re.search(r"loss ([\d.]+), 0 chunks dropped, parameters (\w+)", text)
    assert found, text
    return float(found[1]), found[2]


@pytest.mark.parametrize("form", ["files", "sharded"])
def test_a_killed_worker_is_restarted_and_other_rank_counts_carry_on(form, tmp_path):
    # Faults 33 and 34.
    uninterrupted = run(tmp_path / "whole", 2, "--format", form)
    folder = tmp_path / "killed"
    killed = run(folder, 2, "--format", form, "--crash-at", "25")
    assert "2 ranks resume at step 20" in killed
    assert outcome(killed) == outcome(uninterrupted)
    three = run(folder, 3, "--format", form, "--steps", "90")
    assert "3 ranks resume at step 60" in three
    one = run(folder, 1, "--format", form, "--steps", "120")
    assert "1 ranks resume at step 90" in one
    assert outcome(one)[0] < outcome(three)[0] < outcome(killed)[0]


def test_a_kill_in_the_middle_of_a_save_leaves_the_checkpoint_before_it(tmp_path):
    before = outcome(run(tmp_path, 2, "--steps", "20"))
    # As the kill leaves it: rank 1's file is cut short, and nothing was renamed.
    partial = tmp_path / "step-30.partial"
    partial.mkdir()
    torch.save({"anything": torch.zeros(1000)}, partial / "adacomp-0.pt")
    (partial / "adacomp-1.pt").write_bytes(b"PK\x03\x04cut short")
    text = run(tmp_path, 2, "--steps", "60")
    assert "2 ranks resume at step 20" in text
    assert outcome(text)[0] < before[0]
    assert not partial.exists()


def test_killing_everything_at_any_moment_can_be_resumed(tmp_path):
    uninterrupted = outcome(run(tmp_path / "whole", 2, "--every", "1"))
    folder = tmp_path / "killed"
    resumed = 0
    for wanted in (3, 11, 29):  # saves after every step: most kills hit one
        process = start(folder, 2, "--every", "1")
        try:
            while process.poll() is None and not (folder / f"step-{wanted}").exists():
                time.sleep(0.001)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        # torchrun's workers are in sessions of their own.
        subprocess.run(["pkill", "-KILL", "-f", str(folder)], check=False)
        resumed += (folder / f"step-{wanted}").exists()
    assert resumed == 3
    assert outcome(run(folder, 2, "--every", "1")) == uninterrupted
