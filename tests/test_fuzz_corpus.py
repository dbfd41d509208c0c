"""The fuzz target over its kept corpus, without libFuzzer, and proof that it can fail."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CORPUS = sorted((ROOT / "tests" / "fuzz" / "corpus").iterdir())
KERNELS = sorted(set((ROOT / "csrc" / "cpu").glob("*.cpp")) - {ROOT / "csrc" / "cpu" / "ops.cpp"})
HARNESS = [ROOT / "tests" / "fuzz" / f"{name}.cpp" for name in ("decompress_fuzzer", "replay")]
# The macro: what lies between a vector's end and its capacity is out of bounds too. Not for
# libFuzzer, whose own vectors are compiled without.
SANITIZERS = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-D_GLIBCXX_SANITIZE_VECTOR",
]
FLAGS = ["-std=c++17", "-O1", "-g", "-ffp-contract=off", "-Wall", *SANITIZERS]

# The faults of fuzz::SelfTest in its order from 1, with what must be said of each.
FAULTS = [
    ("short payload", "heap-buffer-overflow"),
    ("skipped chunk", "check failed: every element is written"),
    ("write beyond", "check failed: guards"),
    ("missed NaN", "check failed: a refused bucket is NaN"),
    ("other second time", "check failed: the same bits"),
    ("other value", "check failed: values"),
    ("residual off", "check failed: unsent residual is exact"),
]


def build(path: Path, *options: str) -> Path:
    subprocess.run(["g++", *FLAGS, *options, "-o", path, *HARNESS, *KERNELS], check=True)
    return path


def run(*command: object) -> subprocess.CompletedProcess[str]:
    # Nothing here leaks on purpose, and the search for leaks needs ptrace, which containers lack.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=environment
    )


def test_the_corpus_passes(tmp_path):
    assert len(CORPUS) > 50
    replay = build(tmp_path / "replay")
    done = run(replay, *CORPUS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(CORPUS)} inputs\n"


@pytest.fixture(scope="module")
def self_test(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("fuzz") / "self_test", "-DADACOMP_FUZZ_SELF_TEST")


@pytest.mark.parametrize("number", range(1, len(FAULTS) + 1), ids=[name for name, _ in FAULTS])
def test_the_target_fails_when_something_is_wrong(self_test, number):
    done = run(self_test, number, *CORPUS)
    assert done.returncode != 0
    assert FAULTS[number - 1][1] in done.stderr
    if number == 1:  # and it is the decoder that reads too far
        assert "adacomp::cpu::Decompressor" in done.stderr
