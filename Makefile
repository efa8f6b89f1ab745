# Every target first creates .venv from constraints.txt.
#
#   make demo                        train, compare, generate, report: about six minutes on two cores
#   make demo ARGS="--text my.txt"   the same on your text
#   make PYTHON=python3.12 test      use another Python
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu setup
#                                    install torch from another index, here the CPU build

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PIP_ARGS ?=

ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif

READY := $(VENV)/.ready
LAYERS := backends mixers blocks integrations cli
OLDEST := torch==2.11.0 triton==3.6.0 "setuptools>=77,<82"
BASELINE := tests/bench/baseline
INTERPRETED := $(patsubst %,tests/backends/test_%.py,triton triton_element triton_fast_weights prefetch rounding triton_attention triton_adamw triton_cross_entropy triton_glu triton_norm triton_least_squares triton_rotary triton_time_softmax triton_path triton_levels triton_hopper hopper_numbers carried short_conv fused_step precompile triton_gemv decode_layers latent_attention selective_step rotating_step wkv_step rg_lru_step normalised_step softmax_slots_step tempered_step routed_slots_step rwkv_step token_steps fused_verify latent_steps latent_token paged_attention preconditioned_step ttt_token long_conv implicit_filter hyena_step expert_step token_attention triton_momentum triton_shared_keys wide_conv prompt_lookup)

# A worker that has no test left takes some of another's.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

# The suites start many processes, which would compile the same files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-runs test-kernels test-oldest test-gpu test-graphs test-families test-evidence test-integrations test-parallel test-all lint docs docs-external bench bench-baseline cpu-table conformance portability mutations plugin setup clean

demo: $(READY)
	$(BIN)/deltazoo demo $(ARGS)

# Every mixer, backend and command; then one interpreter case for each kernel phase. One process per core, one thread each.
test: $(READY)
	OMP_NUM_THREADS=1 $(PYTEST) -m "not slow and not kernels and not parallel and not graphs and not runs" $(ARGS)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PYTEST) -m kernel_smoke $(INTERPRETED)

# Training runs, generation with drafts and kept decoders, the engine and the tiny presets: three minutes on two cores.
test-runs: $(READY)
	OMP_NUM_THREADS=1 $(PYTEST) -m "runs and not slow and not parallel and not graphs" tests/blocks tests/parallel $(ARGS)

# All kernels without a GPU: compiled for sm_90, then run in Triton's interpreter and on the Gluon stand-in.
test-kernels: $(READY)
	OMP_NUM_THREADS=1 $(PYTEST) -m "kernels and not slow" tests/backends $(ARGS)
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PYTEST) $(INTERPRETED) $(ARGS)

# The unit tests with the oldest supported torch and Triton, whose torch.compile has had errors that newer versions do not have.
test-oldest:
	$(PYTHON) -m venv build/oldest
	grep -v "^torch==\|^triton==\|^setuptools==" constraints.txt > build/oldest/constraints.txt
	build/oldest/bin/pip install -q -c build/oldest/constraints.txt $(OLDEST) -e ".[dev]"
	OMP_NUM_THREADS=1 build/oldest/bin/python -m pytest -n auto --dist worksteal -m "not slow and not kernels and not parallel" $(ARGS)

# The tests that need a GPU, in SHARDS parts of at most 10 minutes on 16 cores; SHARD names one.
SHARD ?= 1
SHARDS ?= 2
test-gpu: $(READY)
	OMP_NUM_THREADS=1 $(PYTEST) --gpu $(SHARD)/$(SHARDS) $(ARGS)

# Every mixer and MLP with other libraries (peft, bitsandbytes, torchao, accelerate) and with FSDP2: 15 minutes on two cores.
test-integrations: $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[integrations]"
	OMP_NUM_THREADS=1 $(PYTEST) tests/integrations $(ARGS)

# Every mixer split over 2, 3 and 4 processes, and training runs with faults.
test-parallel: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m parallel tests/parallel $(ARGS)

# The graphs of every mixer, and of the layers of the tiny presets: five minutes on two cores.
test-graphs: $(READY)
	OMP_NUM_THREADS=1 $(PYTEST) -m graphs tests/backends tests/mixers tests/blocks tests/docs $(ARGS)

# Folders of transformers of every family of checkpoints, read and written: half a minute on two cores.
test-families: $(READY)
	OMP_NUM_THREADS=1 $(PYTEST) tests/families $(ARGS)

# What small models can and cannot learn, on a CPU: parity and S3, half a minute on two cores.
test-evidence: $(READY)
	OMP_NUM_THREADS=1 $(PYTEST) tests/evidence $(ARGS)

# These, and the GPU tests, which skip themselves without a GPU.
test-all: test test-runs test-kernels

# The repository's root is the package: a link gives it its name for mypy.
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p build/typing && ln -sfn ../.. build/typing/deltazoo
	MYPYPATH=build/typing $(BIN)/mypy $(LAYERS:%=-p deltazoo.%)
	$(BIN)/lint-imports

# The documentation site in build/site: built afresh, warnings are errors, and internal links are checked offline.
docs: $(READY)
	rm -rf build/site build/doctrees
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -E -W --keep-going -d build/doctrees -b html docs build/site $(ARGS)
	$(BIN)/python docs/_ext/check_links.py build/site
	@echo "build/site/index.html"

# Request every external link of the site.
docs-external: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -d build/doctrees -b linkcheck docs build/links $(ARGS)

bench: $(READY)
	$(BIN)/python -m pytest tests/bench --benchmark-storage=file://$(BASELINE) --benchmark-compare $(ARGS)

bench-baseline: $(READY)
	$(BIN)/python -m pytest tests/bench --benchmark-storage=file://$(BASELINE) --benchmark-save=baseline $(ARGS)

# Measure the CPU table of docs/benchmarks.md on this machine.
cpu-table: $(READY)
	$(BIN)/deltazoo bench --backends compile,reference --markdown docs/benchmarks.md $(ARGS)

# The full product of specs, shapes and dtypes, and exports of all mixers: six hours of one core. Parts are selected by name:
# make conformance ARGS="-k 'dplr and float16'", ARGS="-k 'channel-delta and grouped'", ARGS="-k test_one_exported_program".
conformance: $(READY)
	OMP_NUM_THREADS=1 $(PYTEST) -m slow tests/backends tests/mixers tests/blocks $(ARGS)

# Compile every kernel for all supported Triton versions and GPU architectures: hours of one core. Parts:
# make portability ARGS="--triton 3.9.0 --devices sm_89,sm_100 --updates gdn,kda --widths 128,256". See docs/portability.md.
portability: $(READY)
	OMP_NUM_THREADS=1 PYTHONPATH=build/typing $(BIN)/python tests/bench/portability.py $(ARGS)

# Plant bugs in a copy of the source, one at a time; a test must catch each. ARGS="scan decay": those by name.
mutations: $(READY)
	$(BIN)/python tests/mutations.py $(ARGS)

# Install the example plug-in as a user would, and run its tests.
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
	rm -rf deltazoo.egg-info  # a stale copy would hide changed entry points
	$(BIN)/python -m pip install -q -c constraints.txt --upgrade pip  # older ones take a minute to compare file names
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
