#!/usr/bin/env bash
# Builds, tests and times adacomp_torch on a machine with a GPU, in under six minutes; no network.
# Needs Python with torch and pytest, and nvcc; for the training also matplotlib, rich and tqdm.
#
#   examples/gpu_check.sh [REPORT]       default: gpu_report.txt; its exit code is that of the tests
set -uo pipefail
cd "$(dirname "$0")/.."
report=${1:-gpu_report.txt}
exec > >(tee "$report") 2>&1
failed=0

section() { printf '\n== %s (%d s)\n' "$1" "$SECONDS"; }
must() { "$@" || { echo "FAILED: $*"; failed=1; }; }

section "machine"
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
nvcc --version | tail -2
python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'

section "build for this GPU only"
capability=$(python3 -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')
TORCH_CUDA_ARCH_LIST=$capability ADACOMP_CUDA=1 MAX_JOBS=8 timeout 150 \
  python3 setup.py build_ext --inplace >build.log 2>&1 || { tail -30 build.log; exit 1; }
export PYTHONPATH=$PWD

section "tests on the GPU"
must env ADACOMP_REQUIRE_CUDA=1 timeout 150 python3 -m pytest -q -x tests/test_cuda.py

section "benchmark: ratios to the device's copy bandwidth"
must timeout 90 python3 examples/benchmark_ops.py --device cuda --kernels \
  --numel 12500000 100000000 400000000

section "compute-sanitizer, where it is installed"
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    must timeout 40 compute-sanitizer --tool "$tool" --error-exitcode 1 \
      python3 -m pytest -q -x tests/test_cuda.py -k "malformed_payload"
  done
else
  echo "not installed"
fi

section "a short training over NCCL"
if python3 -c 'import matplotlib, rich, tqdm' 2>/dev/null; then
  must timeout 60 torchrun --standalone --nproc-per-node=1 \
    examples/train_lstm.py --device cuda --steps 60
else
  echo "left out: needs matplotlib, rich and tqdm (the tests have a training too)"
fi

section "done"
exit $failed
