"""Wrong environments at build and at import: a working build, or one sentence on what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd="/",
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_building_without_torch_says_how(tmp_path):
    # Fault 43: what happens to `pip install .`, which builds in an environment of its own.
    (tmp_path / "torch.py").write_text("raise ImportError('no torch in this environment')")
    build = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path / "out"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert build.returncode != 0
    assert "no torch in this environment" in build.stderr
    assert "install torch first, then use `pip install --no-build-isolation .`" in build.stderr
    assert not (tmp_path / "out").exists()


WRONG_IMPORTS = {
    "torch upgraded after the build": (
        "import torch; torch.__version__ = '9.9.9'; import adacomp_torch",
        "but torch 9.9.9 is installed: rebuild adacomp_torch with `pip install",
    ),
    "extension does not load": (
        "import sys; sys.modules['adacomp_torch._C'] = None; import adacomp_torch",
        "extension does not load with torch",
    ),
}


@pytest.mark.parametrize("what", WRONG_IMPORTS)
def test_a_build_that_does_not_fit_torch_says_what_to_do(what):
    # Fault 43.
    code, message = WRONG_IMPORTS[what]
    result = python(code)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: adacomp_torch")
    assert message in last
    assert "--no-build-isolation" in last


def test_import_before_torch():
    # Fault 43.
    result = python(
        "import adacomp_torch, sys; assert 'torch' in sys.modules; print(adacomp_torch.has_cuda)"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in ("True", "False")
