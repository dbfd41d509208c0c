"""Builds adacomp_torch._C against the torch that is installed; see README.md, "Install"."""

import sys

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
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
    "csrc/cpu/ops.cpp",
]

# The same input must give the same bytes everywhere: no contraction to FMA, no fast-math.
# BuildExtension adds the -std that torch's headers need.
COMPILE_ARGS = ["-O3", "-g0", "-ffp-contract=off", "-Wall", "-fvisibility=hidden"]

setup(
    ext_modules=[CppExtension("adacomp_torch._C", SOURCES, extra_compile_args=COMPILE_ARGS)],
    cmdclass={"build_ext": BuildExtension},
)
