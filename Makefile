# `make demo` and `make test` do all the set-up: they need Python >= 3.10 with venv, and g++.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch>=2.11,<2.16
DEMO_ARGS ?=
TEST_ARGS ?=
NETBENCH_ARGS ?=
FUZZ_SECONDS ?= 60
FUZZ_CXX ?= clang++
SOAK_MINUTES ?= 1

SOURCES := $(shell find csrc adacomp_torch -name '*.h' -o -name '*.cpp' -o -name '*.cu*' -o -name '*.py' -o -name '*.pyi')
CXX_SOURCES := $(filter %.h %.cpp %.cu %.cuh,$(SOURCES)) $(wildcard tests/*/*.h tests/*/*.cpp)

# The fuzz target and the torch-free code under it; replay.cpp has a main of its own.
FUZZ_SOURCES := tests/fuzz/decompress_fuzzer.cpp $(filter-out csrc/cpu/ops.cpp,$(wildcard csrc/cpu/*.cpp))
FUZZ_FLAGS := -std=c++17 -O2 -g -ffp-contract=off -fsanitize=address,undefined -fno-sanitize-recover=all

.PHONY: demo test soak fuzz fuzz-corpus lint format benchmark netbench clean

# Installed, not editable: environments with different versions of torch can share the tree.
$(VENV)/installed: pyproject.toml setup.py $(SOURCES)
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip "setuptools>=77,<82" wheel ninja numpy
	$(VENV)/bin/pip install --quiet "$(TORCH)"
	rm -rf build/lib*
	$(VENV)/bin/pip install --quiet --no-build-isolation ".[examples,test,lint]"
	$(VENV)/bin/pip install --quiet --no-build-isolation --force-reinstall --no-deps .
	touch $@

demo: $(VENV)/installed
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node=2 examples/train_lstm.py $(DEMO_ARGS)

test: $(VENV)/installed
	$(VENV)/bin/pytest $(TEST_ARGS)

soak: $(VENV)/installed
	$(VENV)/bin/python tests/soak.py --minutes $(SOAK_MINUTES)

lint: $(VENV)/installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	clang-format --dry-run --Werror $(CXX_SOURCES)

format: $(VENV)/installed
	$(VENV)/bin/ruff format .
	clang-format -i $(CXX_SOURCES)

benchmark: $(VENV)/installed
	$(VENV)/bin/python examples/benchmark_ops.py

# As root, on Linux with iproute2: builds hosts in network namespaces. See docs/netbench.md.
netbench: $(VENV)/installed
	$(VENV)/bin/python examples/netbench/run.py --out netbench $(NETBENCH_ARGS)
	$(VENV)/bin/python examples/netbench/plot.py netbench/netbench.csv

# Without the tracing of compared values, which is half of the time: the target repairs the fields that need it.
build/fuzz/decompress_fuzzer: $(CXX_SOURCES) Makefile
	mkdir -p build/fuzz
	$(FUZZ_CXX) $(FUZZ_FLAGS) -fsanitize=fuzzer -fno-sanitize-coverage=trace-cmp -o $@ $(FUZZ_SOURCES)

# New inputs go to build/fuzz/found, the first directory; the kept corpus is only read.
fuzz: build/fuzz/decompress_fuzzer
	mkdir -p build/fuzz/found
	$< -max_total_time=$(FUZZ_SECONDS) -max_len=1024 -timeout=10 -rss_limit_mb=1536 -print_final_stats=1 \
		-artifact_prefix=build/fuzz/ build/fuzz/found tests/fuzz/corpus \
		|| { echo "make fuzz: repeat it with $< FILE, FILE one of:"; ls build/fuzz/*-*; exit 1; }

# Adds one input per edge of the code that the kept corpus does not reach, of what `make fuzz` found.
fuzz-corpus: build/fuzz/decompress_fuzzer
	mkdir -p build/fuzz/found
	$< -merge=1 -use_counters=0 -max_len=1024 tests/fuzz/corpus build/fuzz/found

clean:
	rm -rf build *.egg-info $(VENV)/installed
