# `make demo` and `make test` do all the set-up: they need Python >= 3.10 with venv, and g++.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch>=2.11,<2.16
DEMO_ARGS ?=
TEST_ARGS ?=
SOAK_MINUTES ?= 1

SOURCES := $(shell find csrc adacomp_torch -name '*.h' -o -name '*.cpp' -o -name '*.cu*' -o -name '*.py' -o -name '*.pyi')
CXX_SOURCES := $(filter %.h %.cpp %.cu %.cuh,$(SOURCES)) $(wildcard tests/*/*.h tests/*/*.cpp)

.PHONY: demo test soak lint format benchmark clean

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

clean:
	rm -rf build *.egg-info $(VENV)/installed
