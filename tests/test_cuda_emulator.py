"""The emulator of CUDA blocks: right kernels give exact results, wrong ones are reported."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
SOURCES = ["emulator.cpp", "emulator_test.cpp", "emulator_faults_test.cpp"]
BUILDS = {
    "plain": ["-std=c++17"],
    "sanitized": ["-std=c++20", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
CASES = [
    "arguments",
    "atomics",
    "ballot_compaction",
    "bits",
    "divergent_barrier",
    "early_return",
    "elements",
    "incomplete_warp_operation",
    "invalid_launch",
    "missing_barrier",
    "next_launch",
    "partial_mask",
    "race_between_warps",
    "race_in_warp",
    "race_of_writes",
    "race_without_syncwarp",
    "random_accesses",
    "reduction",
    "seeds",
    "shared_bounds",
    "shuffle_and_barrier",
    "shuffles",
    "syncwarp_orders",
    "uninitialised_read",
    "warp_scan",
    "wide_blocks",
]
FATAL_CASES = {"global_bounds": "heap-buffer-overflow"}  # reported by AddressSanitizer alone


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def require_boost_context() -> None:
    header = "#include <boost/context/fiber.hpp>"
    preprocess = ["g++", "-std=c++17", "-E", "-x", "c++", "-", "-o", os.devnull]
    if subprocess.run(preprocess, input=header, text=True, capture_output=True).returncode == 0:
        return
    if os.environ.get("ADACOMP_REQUIRE_EMULATOR") == "1":
        pytest.fail("the header of Boost.Context is missing")
    pytest.skip("needs Boost.Context: libboost-context-dev")


@pytest.fixture(scope="module", params=BUILDS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    require_boost_context()
    directory = TESTS / "cuda_emulator"
    output = str(tmp_path_factory.mktemp("emulator") / request.param)
    command = ["g++", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *BUILDS[request.param]]
    command += ["-DADACOMP_CUDA_EMULATOR", f"-I{directory}", f"-I{TESTS.parent / 'csrc/cuda'}"]
    command += [str(directory / source) for source in SOURCES]
    built = run([*command, "-lboost_context", "-o", output])
    assert built.returncode == 0, built.stderr
    return output


@pytest.mark.parametrize("case", CASES)
def test_case(program: str, case: str) -> None:
    result = run([program, case])
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


@pytest.mark.parametrize("program", ["sanitized"], indirect=True)
@pytest.mark.parametrize("case", FATAL_CASES)
def test_fatal_case(program: str, case: str) -> None:
    result = run([program, case])
    assert result.returncode != 0
    assert f"ERROR: AddressSanitizer: {FATAL_CASES[case]}" in result.stderr
    assert "write_global" in result.stderr


def test_all_cases_are_run(program: str) -> None:
    fatal = FATAL_CASES if Path(program).name == "sanitized" else {}
    assert run([program, "--list"]).stdout.split() == sorted([*CASES, *fatal])
