"""Builds adacomp_torch._C against the torch that is installed; see README.md, "Install".

ADACOMP_CUDA: auto (the default: with CUDA if torch and nvcc have the same major version), 0 or 1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ImportError as error:
    sys.exit(
        f"adacomp_torch builds against the installed torch, which cannot be imported here "
        f"({error}): install torch first, then use `pip install --no-build-isolation .`"
    )

SOURCES = [
    "csrc/library.cpp",
    "csrc/op_checks.cpp",
    "csrc/cpu/compress.cpp",
    "csrc/cpu/decompress.cpp",
    "csrc/cpu/gradient.cpp",
    "csrc/cpu/kernels.cpp",
    "csrc/cpu/kernels_avx2.cpp",
    "csrc/cpu/kernels_avx512.cpp",
    "csrc/cpu/kernels_portable.cpp",
    "csrc/cpu/ops.cpp",
    "csrc/cpu/range.cpp",
]
CUDA_SOURCES = ["csrc/cuda/kernels.cu", "csrc/cuda/ops.cpp"]

# The same input must give the same bytes everywhere: no contraction to FMA, no fast-math.
# BuildExtension adds the -std that torch's headers need.
COMPILE_ARGS = ["-O3", "-g0", "-ffp-contract=off", "-Wall", "-fvisibility=hidden"]
# at::parallel_for is serial without it. Not for the linker: the runtime must be the one that torch
# brings along, or torch.set_num_threads() would speak to another.
COMPILE_ARGS += ["-fopenmp"]
NVCC_ARGS = ["-O3", "-fmad=false", "-Xptxas", "-v"]  # -v: registers and spills, for the build's log
ARCHITECTURES = "7.5;8.0;8.6;8.9;9.0+PTX"  # used unless TORCH_CUDA_ARCH_LIST is set


def why_not_cuda() -> str | None:
    """Says what keeps the CUDA kernels from being built, if anything does."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    nvcc = Path(CUDA_HOME or "", "bin", "nvcc")
    if CUDA_HOME is None or not nvcc.exists():
        return f"no nvcc: install the CUDA toolkit {torch.version.cuda} or set CUDA_HOME"
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"release ([\d.]+)", said)
    found = version[1] if version else "unknown"
    if found.split(".")[0] != torch.version.cuda.split(".")[0]:
        return (
            f"{nvcc} is of CUDA {found}, torch of CUDA {torch.version.cuda}: install that toolkit"
        )
    return None


def with_cuda() -> bool:
    mode = os.environ.get("ADACOMP_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        sys.exit(f"ADACOMP_CUDA: expected auto, 0 or 1, got {mode!r}")
    if mode == "0":
        return False
    reason = why_not_cuda()
    if reason and mode == "1":
        sys.exit(f"ADACOMP_CUDA=1, but {reason}")
    if reason:
        print(f"adacomp_torch: building for the CPU only: {reason}")
    return reason is None


def extension() -> CppExtension:
    if not with_cuda():
        return CppExtension("adacomp_torch._C", SOURCES, extra_compile_args=COMPILE_ARGS)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
    return CUDAExtension(
        "adacomp_torch._C",
        SOURCES + CUDA_SOURCES,
        define_macros=[("ADACOMP_WITH_CUDA", None)],
        extra_compile_args={"cxx": COMPILE_ARGS, "nvcc": NVCC_ARGS},
    )


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildExtension})
