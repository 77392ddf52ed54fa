# Everything a newcomer needs; `make help` explains it. The environment is made in .venv by the targets themselves.

PYTHON ?= python3
TORCH ?= torch
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
CARGO ?= cargo
# One interpreter for every build of the bindings, so that cargo does not build PyO3 again for each.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python

# What the extension is built from. Python files are used where they are.
RUST_SOURCES := $(shell find src -name '*.rs' 2>/dev/null) $(wildcard Cargo.toml Cargo.lock pyproject.toml build.rs)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory --no-builtin-rules
.PHONY: help venv build failpoints demo test test-rust test-loom test-python test-gpu fuzz fuzz-programs mutants lint bench compare compare-gpu wheel clean

help: ## Say what can be done (this text)
	@echo 'rustloader: a drop-in replacement for torch.utils.data.DataLoader with a Rust engine'
	@echo
	@echo 'Targets:'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'Variables (now):'
	@echo '  PYTHON=$(PYTHON)   the Python that .venv gets: a name or a path, 3.11 or newer'
	@echo '  TORCH=$(TORCH)   the torch that .venv gets, as pip takes it, for instance TORCH=torch==2.6.0'
	@echo '  ARGS=$(ARGS)   further arguments for demo, compare, bench and tests, for instance ARGS=--help'
	@echo
	@echo 'All that use Python set up .venv first (about 5 GB with torch) and keep it until PYTHON or TORCH changes.'

demo: build ## Train a net on image files through torch and through rustloader; compare the two
	$(BIN)/python examples/train_digits.py $(ARGS)

test: build test-rust test-loom test-python ## Run all tests: Rust, loom, Python

test-rust: ## Only the Rust tests (debug with failpoints, then the property tests in release)
	$(CARGO) test --features failpoints
	$(CARGO) test --release --lib --test scheduler_model --test garbage

# A target directory of its own: other RUSTFLAGS would make cargo build everything again each time.
test-loom: ## Only the loom models of the lock-free parts
	RUSTFLAGS="$$RUSTFLAGS --cfg loom" $(CARGO) test --release --target-dir target/loom --test 'loom_*'

test-python: build failpoints ## Only the Python tests (ARGS='-k name')
	$(BIN)/python -m pytest tests/python $(ARGS)

fuzz: build ## Send random trees through torch's loader and ours until they differ (ARGS='--trees 20000 --seed 1')
	cd tests/python && $(abspath $(BIN))/python -m roundtrip.fuzz $(ARGS)

mutants: build ## Break our code in one place after the other: do the tests notice? (ARGS='--list', ARGS=--help)
	$(BIN)/python tests/mutants/run.py $(ARGS)

fuzz-programs: build ## Run random programs through torch's loader and ours (ARGS='--programs 5000 --seed 7')
	cd tests/python && ../../$(BIN)/python -m differential --coverage $(ARGS)

# On a machine without a CUDA device all of them are skipped.
test-gpu: build ## Only the tests that need a CUDA device
	$(BIN)/python -m pytest tests/python -m gpu $(ARGS)

lint: build ## Formatters, linters and type checkers for Rust and Python
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets -- -D warnings
	$(CARGO) clippy --all-targets --features python -- -D warnings
	$(CARGO) clippy --all-targets --features python,failpoints -- -D warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest rustloader._core --allowlist tests/stubtest-allowlist.txt --ignore-unused-allowlist --mypy-config-file pyproject.toml

failpoints: target/failpoints/.built ## Build the extension that tests have system calls refused in (not installed)

bench: ## Rust benchmarks of scheduler, ring and arena (criterion; no Python)
	$(CARGO) bench $(ARGS)

compare: build ## Compare with torch's DataLoader (ARGS='--quick', ARGS='--persistent', ARGS=--help)
	$(BIN)/python benches/compare.py $(ARGS)

compare-gpu: build ## The same for pinned batches, with a CUDA device
	$(BIN)/python benches/gpu.py $(ARGS)

wheel: $(VENV)/.made-with ## Build a wheel into dist/
	$(BIN)/maturin build --release --out dist

clean: ## Remove all that was made here: .venv, builds, caches, the demo's images
	rm -rf .venv target dist .mypy_cache .pytest_cache .ruff_cache .hypothesis examples/data
	rm -f python/rustloader/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up -----------------------------------------------------------------------------------------------------

venv: $(VENV)/.made-with
build: $(VENV)/.built

# .made-with holds what PYTHON and TORCH were. Where it says something else, or the Python behind it has gone,
# scripts/venv.sh runs again and changes what has to change.
export PYTHON TORCH
MADE_WITH := $(shell test -x $(BIN)/python && cat $(VENV)/.made-with 2>/dev/null)
ifneq ($(MADE_WITH),PYTHON=$(PYTHON) TORCH=$(TORCH))
.PHONY: $(VENV)/.made-with
endif

$(VENV)/.made-with: pyproject.toml scripts/venv.sh
	@sh scripts/venv.sh $(VENV)

HAS_CARGO = command -v $(CARGO) >/dev/null || { echo 'error: cargo was not found. Install Rust (rustup), or put its bin folder on PATH.' >&2; exit 1; }

target/failpoints/.built: $(VENV)/.made-with $(RUST_SOURCES)
	@$(HAS_CARGO)
	@echo 'Building the Rust extension with failpoints ...'
	@$(CARGO) build --quiet --lib --profile failpoints --features python,failpoints --target-dir target
	@touch $@

$(VENV)/.built: $(VENV)/.made-with $(RUST_SOURCES)
	@$(HAS_CARGO)
	@echo 'Building the Rust extension (release) ...'
	@PIP_QUIET=1 VIRTUAL_ENV='$(CURDIR)/$(VENV)' $(BIN)/maturin develop --release
	@touch $@
