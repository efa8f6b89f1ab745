# Every target sets itself up: the first one makes .venv, from constraints.txt.
#
#   make demo                        train, compare, generate, report: about six minutes on two cores
#   make demo ARGS="--text my.txt"   the same on your own text
#   make PYTHON=python3.12 test      with another Python
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu setup
#                                    torch from another index, as this one without the CUDA libraries

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif

READY := $(VENV)/.ready
FLOORS := backends mixers blocks cli
BASELINE := tests/bench/baseline
KERNELS := triton triton_hopper hopper_numbers short_conv fused_step ahead

.PHONY: demo test lint bench bench-baseline readme-table conformance plugin setup clean

demo: $(READY)
	$(BIN)/deltazoo demo $(ARGS)

# A process a core, each with one thread; then the kernels, in Triton's interpreter.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto $(ARGS)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto $(KERNELS:%=tests/backends/test_%.py)

# mypy finds the package, which is the repository's root, under its name through a link.
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/typing && ln -sfn ../.. build/typing/deltazoo
	MYPYPATH=build/typing $(BIN)/mypy $(FLOORS:%=-p deltazoo.%)
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m pytest tests/bench --benchmark-storage=file://$(BASELINE) --benchmark-compare $(ARGS)

bench-baseline: $(READY)
	$(BIN)/python -m pytest tests/bench --benchmark-storage=file://$(BASELINE) --benchmark-save=baseline $(ARGS)

# The table of README.md, measured on this machine.
readme-table: $(READY)
	$(BIN)/deltazoo bench --backends compile,reference --markdown README.md $(ARGS)

# The product of specs, shapes and dtypes: five to six hours of one core, a process a core. In parts, by what the
# parts are named after: make conformance ARGS="-k 'dplr and float16'", ARGS="-k 'channel-delta and grouped'".
conformance: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow tests/backends -n auto $(ARGS)

# The example plug-in, installed as its users would and tested by the kit.
plugin: $(READY)
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e examples/deltazoo-example
	$(BIN)/python -m pytest examples/deltazoo-example

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("deltazoo needs Python 3.11 or newer, got " + sys.version.split()[0] + "; try make PYTHON=python3.12")'
	test -d $(BIN) || $(PYTHON) -m venv $(VENV)
ifdef TORCH_INDEX
	$(BIN)/python -m pip install -c constraints.txt --index-url $(TORCH_INDEX) torch
endif
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
