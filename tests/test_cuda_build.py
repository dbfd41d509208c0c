"""A build with CUDA, on a machine with or without a GPU: all kernels for all architectures."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import adacomp_torch
from adacomp_torch import _C

ARCHITECTURES = {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90"}
# Per gradient dtype, and where they differ per scale mode.
KERNELS = {
    "select_chunks": 6,
    "scale_segments": 1,
    "place_ranges": 1,
    "commit_payload": 3,
    "check_payloads": 1,
    "decode_payloads": 6,
    "finish_bucket": 3,
    "restore_chunks": 6,
}


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    found = shutil.which("cuobjdump")
    triton = importlib.util.find_spec("triton")  # comes with torch, and with a copy of the tool
    if found is None and triton is not None and triton.origin is not None:
        bin_folder = Path(triton.origin).parent / "backends" / "nvidia" / "bin"
        found = shutil.which("cuobjdump", path=str(bin_folder))
    if adacomp_torch.has_cuda and found and "TORCH_CUDA_ARCH_LIST" not in os.environ:
        return found
    if os.environ.get("ADACOMP_REQUIRE_NVCC") == "1":
        pytest.fail(f"has_cuda is {adacomp_torch.has_cuda}, cuobjdump is {found}")
    pytest.skip("needs a build with CUDA for all architectures, and cuobjdump")


def test_every_kernel_is_there_for_every_architecture_and_none_spills(cuobjdump):
    command = [cuobjdump, "--dump-resource-usage", _C.__file__]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, dict[str, int]] = {}
    architecture = ""
    for line in text.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            architecture = match[1]
            found.setdefault(architecture, dict.fromkeys(KERNELS, 0))
        elif match := re.match(r" Function (\w+):", line):
            (name,) = [kernel for kernel in KERNELS if f"{len(kernel)}{kernel}" in match[1]]
            found[architecture][name] += 1
        elif match := re.match(r"  REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", line):
            registers, stack, shared, local = map(int, match.groups())
            assert (stack, local) == (0, 0), f"{name} spills on {architecture}"
            assert registers * 256 <= 64 * 1024
            assert shared <= 48 * 1024
    assert found == dict.fromkeys(ARCHITECTURES, KERNELS)


def test_code_for_later_architectures_is_there(cuobjdump):
    command = [cuobjdump, "--list-ptx", _C.__file__]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "sm_90.ptx" in text


SETUP = Path(__file__).parent.parent / "setup.py"
REFUSALS = {
    "nonsense": ({"ADACOMP_CUDA": "yes"}, "ADACOMP_CUDA: expected auto, 0 or 1, got 'yes'"),
    "no toolkit": (
        {"ADACOMP_CUDA": "1", "CUDA_HOME": "/nowhere"},
        "ADACOMP_CUDA=1, but no nvcc: install the CUDA toolkit ",
    ),
    "another toolkit": (
        {"ADACOMP_CUDA": "1", "CUDA_HOME": "OLD"},
        "is of CUDA 9.2, torch of CUDA ",
    ),
}


@pytest.mark.skipif(torch.version.cuda is None, reason="torch itself is built without CUDA")
@pytest.mark.parametrize("what", REFUSALS)
def test_a_build_that_cannot_have_cuda_says_why(what, tmp_path):
    # Fault 43.
    environment, message = REFUSALS[what]
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 9.2, V9.2.88'\n")
    nvcc.chmod(0o755)
    if environment.get("CUDA_HOME") == "OLD":
        environment = {**environment, "CUDA_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, SETUP.name, "--version"],
        cwd=SETUP.parent,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert message in result.stderr
