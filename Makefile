# Everything a newcomer needs; `make help` explains it. The environment is made in .venv by the targets themselves.

PYTHON ?= python3
TORCH ?= torch
ARGS ?=

VENV := .venv
ECOSYSTEM := .venv-ecosystem
RAY := .venv-ray
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
CARGO ?= cargo
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
# One interpreter for every build of the bindings, so that cargo does not build PyO3 again for each.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python

# What the extension is built from. Python files are used where they are.
RUST_SOURCES := $(shell find src -name '*.rs' 2>/dev/null) $(wildcard Cargo.toml Cargo.lock pyproject.toml build.rs)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory --no-builtin-rules
.PHONY: help venv build failpoints demo test test-fast test-rust test-loom test-python test-gpu stress-gpu sanitize-gpu fuzz fuzz-programs fuzz-ray resume-programs soak faults kill restarts connections stress-ray \
	interrupts ends drops forks failures mutants asan audit lint bench bench-save bench-check compare \
	compare-memory compare-sharing compare-growth compare-scheduling compare-auto compare-starts compare-resuming compare-restarts compare-breakdown compare-peers compare-ray compare-gpu \
	reliability-figures ecosystem test-ray wheel dist docs clean

help: ## Show this text
	@echo 'rustloader: a drop-in replacement for torch.utils.data.DataLoader with a Rust engine'
	@echo
	@echo 'Targets:'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'Variables, with their current values:'
	@echo '  PYTHON=$(PYTHON)   the Python of .venv: a name or a path, 3.11 or newer'
	@echo '  TORCH=$(TORCH)   the torch of .venv, as an argument of pip, for instance TORCH=torch==2.6.0'
	@echo '  ARGS=$(ARGS)   more arguments for demo, compare, bench and tests, for instance ARGS=--help'
	@echo
	@echo 'Targets that use Python first set up .venv (about 5 GB with torch), and keep it until PYTHON or TORCH changes.'

demo: build ## See what rustloader gains on this machine, and that a training's losses stay the same (ARGS=--help)
	$(BIN)/python examples/demo $(ARGS)

test: build test-rust test-loom test-python ## Run all tests: Rust, loom, Python

test-rust: ## Run the Rust tests only, with failpoints
	$(CARGO) test --features failpoints

# A target directory of its own: other RUSTFLAGS would make cargo build everything again each time.
test-loom: ## Run the loom models of the lock-free parts only
	RUSTFLAGS="$$RUSTFLAGS --cfg loom" $(CARGO) test --release --target-dir target/loom --test 'loom_*'

# Tests that run at the same time: they wait about as long as they work, so twice the cores, up to 8. Each of the processes
# that run them takes 400 MB.
JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? 2 * cores : 8)))
# A worker of pytest-xdist that has run out of tests takes some of another's.
SHARED := --dist worksteal --max-worker-restart 0

# Scheduler, engine, shared memory and codec in Rust; in Python an end-to-end file for each package, and the class.
FAST := class iteration worker codec pinning stats cli_arguments cli_bench_passes
test-fast: build ## Run a part of the tests, for work on the code (under 90 s on two cores)
	$(CARGO) test --features failpoints --lib --test '*_model' --test 'engine_*' --test garbage
	$(PYTEST) $(FAST:%=tests/python/test_%.py) -n $(JOBS) $(SHARED) -m 'not alone and not slow' $(ARGS)

LAST_FAILED := .pytest_cache/v/cache/lastfailed

# Two passes, the second for the tests marked `alone`. Status 5: a pass has none. After a crash there is no list of what failed.
PASS = $(PYTEST) tests/python $(1) $(ARGS) || case $$? in 1) status=1 ;; 5) ;; *) rm -f $(LAST_FAILED); exit 1 ;; esac
test-python: build failpoints ## Run the Python tests only (ARGS='-k name'; JOBS=1 runs one at a time)
ifeq ($(JOBS),1)
	$(PYTEST) tests/python $(ARGS)
else
	@set -x; status=0; $(call PASS,-n $(JOBS) $(SHARED) -m 'not alone'); $(call PASS,-m alone); exit $$status
endif

fuzz: build ## Send random trees through both loaders and compare (ARGS='--trees 20000 --seed 1')
	cd tests/python && $(abspath $(BIN))/python -m roundtrip.fuzz $(ARGS)

mutants: build ## Break the code in one place after the other: do the tests notice? (ARGS='--list', ARGS=--help)
	$(BIN)/python tests/mutants/run.py $(ARGS)

# Each takes minutes; `make test` runs a short form of each.
faults: build ## End a worker in every way at every place, under every kind of loader (ARGS='--only fork')
	cd tests/python && ../../$(BIN)/python -m faults.matrix --all $(ARGS)

kill: build ## Kill a worker or the main process at random moments (ARGS='--epochs 500 --seed 1')
	cd tests/python && ../../$(BIN)/python -m faults.kill $(ARGS)

restarts: build ## Kill workers that start again, at random moments (ARGS='--epochs 500 --seed 1', ARGS='--leaks 1000')
	cd tests/python && $(abspath $(BIN))/python -m faults.restarts $(ARGS)

connections: build ## Workers elsewhere over connections that fail, at random moments (ARGS='--epochs 500 --seed 1')
	cd tests/python && $(abspath $(BIN))/python -m faults.connections $(ARGS)

stress-ray: build $(RAY)/.made-with ## The same on a Ray cluster that loses nodes and main processes, for 10 minutes (ARGS='--minutes 2')
	@$(IN_ITS_OWN_NETWORK) cd tests/python; "$$@" $(abspath $(RAY))/bin/python -m faults.connections --ray --epochs 100000 --minutes 10 $(ARGS)

interrupts: build ## Press Ctrl-C at random moments (ARGS='--count 1000 --seed 1')
	cd tests/python && ../../$(BIN)/python -m faults.interrupts $(ARGS)

ends: build ## End the main process in every way at every place (ARGS='--only fork')
	cd tests/python && ../../$(BIN)/python -m faults.ends --all $(ARGS)

drops: build ## Drop iterators at any moment, in every way (ARGS='--count 1000 --seed 1')
	cd tests/python && ../../$(BIN)/python -m faults.drops $(ARGS)

forks: build ## Fork while other loaders work (ARGS='--forks 500 --seed 1')
	cd tests/python && ../../$(BIN)/python -m faults.forks $(ARGS)

failures: build failpoints ## Make each system call of an epoch fail, or end its process (ARGS='--kind mmap')
	cd tests/python && ../../$(BIN)/python -m faults.failures $(ARGS)

fuzz-programs: build ## Run random programs through both loaders and compare (ARGS='--programs 5000 --seed 7')
	cd tests/python && ../../$(BIN)/python -m differential --coverage $(ARGS)

fuzz-ray: build $(RAY)/.made-with ## The same with workers on a Ray cluster (ARGS='--programs 200 --seed 7')
	@$(IN_ITS_OWN_NETWORK) cd tests/python; "$$@" $(abspath $(RAY))/bin/python -m differential --start-method ray $(ARGS)

resume-programs: build ## Stop and resume loaders in random programs, against a model (ARGS='--programs 10000 --seed 1')
	cd tests/python && $(abspath $(BIN))/python -m stateful.model $(ARGS)

soak: build ## Run loaders of random kinds with faults mixed in (ARGS='--minutes 20 --seed 1')
	cd tests/python && $(abspath $(BIN))/python -m faults.soak $(ARGS)

# The extension needs an ASan runtime in the process before it: gcc's, and the C++ library, so that torch's exceptions pass.
ASAN_TESTS := test_codec.py test_tensors.py test_leases.py test_transport_torch.py test_damage.py
asan: build ## Run the Rust tests and some Python tests under AddressSanitizer (needs a nightly Rust and gcc's libasan)
	RUSTFLAGS="$$RUSTFLAGS -Zsanitizer=address" $(CARGO) +nightly test --tests --no-fail-fast --features failpoints --target $(HOST) --target-dir target/asan
	RUSTFLAGS="$$RUSTFLAGS -Zsanitizer=address" $(CARGO) +nightly build --lib --features python --target $(HOST) --target-dir target/asan
	rm -rf target/asan/python && mkdir target/asan/python && cp -r python/rustloader target/asan/python/
	cp target/asan/$(HOST)/debug/librustloader.so target/asan/python/rustloader/_core.abi3.so
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=target/asan/python $(BIN)/python -m pytest $(addprefix tests/python/,$(ASAN_TESTS)) $(ARGS)

# Both ask databases on the network, which lint does not need.
audit: $(VENV)/.made-with ## Look for known vulnerabilities of the dependencies (cargo install cargo-audit; needs the network)
	$(CARGO) audit
	$(BIN)/python -m venv target/audit && target/audit/bin/pip install --quiet pip-audit
	target/audit/bin/pip-audit --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# On a machine without a CUDA device all of them are skipped.
test-gpu: build ## Run the tests that need a CUDA device
	$(BIN)/python -m pytest tests/python -m gpu $(ARGS)

stress-gpu: build ## Delay streams and drop batches on a CUDA device, for 10 minutes (ARGS='--minutes 2')
	cd tests/python && $(abspath $(BIN))/python -m faults.device_stress $(ARGS)

SANITIZER ?= compute-sanitizer
sanitize-gpu: build ## Run an epoch with small batches under compute-sanitizer, on a CUDA device
	@command -v $(SANITIZER) >/dev/null || { echo 'error: $(SANITIZER) was not found. It comes with the CUDA toolkit: put its bin folder on PATH, or name it in SANITIZER.' >&2; exit 1; }
	cd tests/python && $(SANITIZER) --target-processes application-only --report-api-errors no --error-exitcode 1 $(abspath $(BIN))/python -m faults.device_stress --small --epochs 1 $(ARGS)

lint: build ## Run formatters, linters and type checkers for Rust and Python
	$(CARGO) fmt --check
	$(CARGO) clippy --all-targets -- -D warnings
	$(CARGO) clippy --all-targets --features python -- -D warnings
	$(CARGO) clippy --all-targets --features python,failpoints -- -D warnings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m mypy.stubtest rustloader._core --allowlist tests/stubtest-allowlist.txt --ignore-unused-allowlist --mypy-config-file pyproject.toml

failpoints: target/failpoints/.built ## Build the extension with failpoints, for tests that refuse system calls (not installed)

bench: ## Run the Rust benchmarks of scheduler, ring and arena (criterion; no Python)
	$(CARGO) bench $(ARGS)

bench-save: ## Run the Rust benchmarks and keep the results for `make bench-check`
	$(CARGO) bench $(ARGS) -- --save-baseline before

bench-check: ## Run the Rust benchmarks and compare with `make bench-save` (exit status 2 if anything became slower)
	$(CARGO) bench $(ARGS) -- --baseline before >target/bench-check.txt
	@cat target/bench-check.txt
	@! grep --quiet 'Performance has regressed' target/bench-check.txt

compare: build ## Compare with torch's DataLoader (ARGS='--quick', ARGS='--persistent', ARGS=--help)
	$(BIN)/python benches/compare.py $(ARGS)

compare-memory: build ## Compare the peak memory of both loaders (needs the right to create a cgroup)
	$(BIN)/python benches/memory.py $(ARGS)

compare-sharing: build ## Measure what rustloader.share() saves, and what reading and building cost (ARGS='--parts reads')
	$(BIN)/python benches/sharing.py $(ARGS)

compare-growth: build ## Measure how both loaders grow with workers, prefetching, leaves and bytes (ARGS='--only workers')
	$(BIN)/python benches/growth.py $(ARGS)

compare-scheduling: build ## Compare uneven batches, slow storage, large samplers and tables (ARGS='--rows spikes')
	$(BIN)/python benches/scheduling.py $(ARGS)

compare-auto: build ## Measure num_workers="auto" against fixed numbers of workers (ARGS='--rows eight')
	$(BIN)/python benches/auto.py $(ARGS)

compare-starts: build ## Compare the time to the first batch under forkserver and spawn (ARGS='--rows spawn')
	$(BIN)/python benches/starts.py $(ARGS)

compare-resuming: build ## Compare what saving and resuming a position cost with torchdata (ARGS='--rows state')
	$(BIN)/python benches/resuming.py $(ARGS)

compare-restarts: build ## Measure what the options against faults cost (ARGS='--rows tokens')
	$(BIN)/python benches/restarts.py $(ARGS)

compare-breakdown: build ## Measure where the time of a batch goes
	$(BIN)/python benches/breakdown.py $(ARGS)

compare-peers: build ## Compare with the loaders of torchdata and SPDL too (those missing in .venv are left out)
	$(BIN)/python benches/peers.py $(ARGS)

compare-ray: build $(RAY)/.made-with ## Compare workers on a Ray cluster with local ones (ARGS='--rows big')
	@$(IN_ITS_OWN_NETWORK) "$$@" $(RAY)/bin/python benches/remote.py $(ARGS)

compare-gpu: build ## Compare pinned batches and their way to the device, on a CUDA device
	$(BIN)/python benches/gpu.py $(ARGS)
	$(BIN)/python benches/to_device.py $(ARGS)
	$(BIN)/python benches/registered.py

reliability-figures: build ## Measure how fast faults are seen and how long shutdowns take (ARGS='--write docs/reliability.md')
	$(BIN)/python benches/reliability.py $(ARGS)

# Not a part of `make test`: it needs the network once, and what it tests is written by others.
ecosystem: build $(ECOSYSTEM)/.made-with ## Run Lightning, transformers, timm and nine more on both loaders (another 6 GB)
	$(ECOSYSTEM)/bin/python -m pytest tests/ecosystem $(ARGS)

# Ray listens on all interfaces: where the system allows it, in a network of its own, with the loopback alone.
ALONE := unshare --net --map-root-user sh -c 'ip link set lo up && exec "$$@"' alone
IN_ITS_OWN_NETWORK = if $(ALONE) true 2>/dev/null; then set -- $(ALONE); else set --; fi; set -x;
test-ray: build $(RAY)/.made-with ## Run workers as actors of a small Ray cluster (another 300 MB)
	@$(IN_ITS_OWN_NETWORK) "$$@" $(RAY)/bin/python -m pytest tests/ray -W default $(ARGS)

wheel: $(VENV)/.made-with ## Build a wheel into dist/
	$(BIN)/maturin build --release --out dist

dist: $(VENV)/.made-with ## Build and check a release in dist/: this machine's wheel and its symbols, the wheel for macOS and Windows, the sdist
	rm -rf dist
	$(BIN)/maturin build --profile dist --out dist
	$(BIN)/python scripts/split_symbols.py dist/*.whl
	$(BIN)/python scripts/pure_wheel.py dist/*.whl
	$(BIN)/maturin sdist --out dist
	$(BIN)/python -m venv target/twine && target/twine/bin/pip install --quiet twine
	target/twine/bin/twine check --strict dist/*.whl dist/*.tar.gz

# Built from sources alone: an environment of its own, without torch.
DOCS := target/docs
docs: $(DOCS)/.made ## Build the documentation's site in target/site; a dead link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)

$(DOCS)/.made: pyproject.toml
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/pip --disable-pip-version-check install --quiet $$($(PYTHON) -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

clean: ## Remove everything that make created: .venv, builds, caches, the demo's images
	rm -rf .venv .venv-ecosystem .venv-ray target dist .mypy_cache .pytest_cache .ruff_cache .hypothesis examples/data demo.png
	rm -f python/rustloader/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up -----------------------------------------------------------------------------------------------------

venv: $(VENV)/.made-with
build: $(VENV)/.built ## Build the extension and install it into .venv

# .made-with holds what PYTHON and TORCH were. Where it says something else, or the Python behind it has gone,
# scripts/venv.sh runs again and changes what has to change.
export PYTHON TORCH
MADE_WITH := $(shell test -x $(BIN)/python && cat $(VENV)/.made-with 2>/dev/null)
ifneq ($(MADE_WITH),PYTHON=$(PYTHON) TORCH=$(TORCH))
.PHONY: $(VENV)/.made-with
endif

$(VENV)/.made-with: pyproject.toml scripts/venv.sh
	@sh scripts/venv.sh $(VENV)

$(ECOSYSTEM)/.made-with: $(VENV)/.made-with tests/ecosystem/requirements.txt scripts/ecosystem.sh
	@sh scripts/ecosystem.sh $(ECOSYSTEM) $(VENV)

$(RAY)/.made-with: $(VENV)/.made-with scripts/ray.sh
	@sh scripts/ray.sh $(RAY) $(VENV)

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
