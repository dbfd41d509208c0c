"""The CUDA kernels, run by the emulator: the same bits as the CPU's, and no access out of place."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_cuda_emulator import require_boost_context, run

TESTS = Path(__file__).parent
SOURCES = [
    "tests/cuda_emulator/emulator.cpp",
    "tests/cuda_emulator/kernels_bucket.cpp",
    "tests/cuda_emulator/kernels_malformed_test.cpp",
    "tests/cuda_emulator/kernels_test.cpp",
]
CPU_KERNELS = sorted(
    set((TESTS.parent / "csrc/cpu").glob("*.cpp")) - {TESTS.parent / "csrc/cpu/ops.cpp"}
)
BUILDS = {
    "plain": ["-std=c++17"],
    "sanitized": ["-std=c++20", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
# Another order of threads and other gradients for each build.
SEEDS = {"plain": "1", "sanitized": "2"}
CASES = [
    "alignments",
    "dropped_chunks",
    "every_bit_flip",
    "gradients_cancel",
    "gradients_dense",
    "gradients_non_finite",
    "gradients_normal",
    "gradients_rare",
    "gradients_ties",
    "gradients_wide",
    "gradients_zero",
    "malformed_entries",
    "malformed_entries_of_many",
    "malformed_entries_of_rare_bins",
    "malformed_entries_of_wide_bins",
    "malformed_headers",
    "malformed_scales_and_tables",
    "many_ranks",
    "many_small_segments",
    "moved_ranges",
    "no_counters",
    "noise",
    "nothing_at_all",
    "order_of_sums",
    "places_of_many_chunks",
    "scale_of_many_chunks",
    "sizes_of_bin_1",
    "sizes_of_bin_16383",
    "sizes_of_bin_2",
    "sizes_of_bin_2048",
    "sizes_of_bin_2049",
    "sizes_of_bin_49",
    "sizes_of_bin_50",
    "sizes_of_bin_500",
    "sizes_of_bin_5000",
    "sizes_of_bin_63",
    "sizes_of_bin_64",
]


@pytest.fixture(scope="module", params=BUILDS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    require_boost_context()
    emulator = TESTS / "cuda_emulator"
    output = str(tmp_path_factory.mktemp("kernels") / request.param)
    command = ["g++", "-O1", "-g", "-Wall", "-Wextra", "-Werror", *BUILDS[request.param]]
    command += ["-ffp-contract=off", "-DADACOMP_CUDA_EMULATOR"]
    command += [f"-I{emulator}", f"-I{TESTS.parent / 'csrc/cuda'}"]
    command += [str(TESTS.parent / source) for source in SOURCES]
    command += [str(source) for source in CPU_KERNELS]
    built = run([*command, "-lboost_context", "-o", output])
    assert built.returncode == 0, built.stderr
    return output


@pytest.mark.parametrize("case", CASES)
def test_case(program: str, case: str) -> None:
    result = run([program, case, SEEDS[Path(program).name]])
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_all_cases_are_run(program: str) -> None:
    assert run([program, "--list"]).stdout.split() == CASES
