# The tasks of development; `make help` lists them. The targets create .venv themselves.

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
# All builds of the bindings use the same interpreter, so that cargo does not rebuild PyO3 for each.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python

# The sources of the extension. Python files need no build: they are imported from the source tree.
RUST_SOURCES := $(shell find src -name '*.rs' 2>/dev/null) Cargo.toml Cargo.lock pyproject.toml

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory --no-builtin-rules
.PHONY: help demo test test-all test-fast test-python test-loom test-docs test-gpu test-ray ecosystem stress compare lint asan \
	mutants audit build failpoints wheel dist docs clean

help: ## Show this text
	@echo 'rustloader: a drop-in replacement for torch.utils.data.DataLoader with a Rust engine'
	@echo
	@echo 'Targets:'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'Variables, with their current values:'
	@echo '  PYTHON=$(PYTHON)   the Python of .venv: a name or a path, 3.11 or newer'
	@echo '  TORCH=$(TORCH)   the torch of .venv, as a requirement for pip, for example TORCH=torch==2.6.0'
	@echo '  ARGS=$(ARGS)   additional arguments for the program or the tests, for example ARGS=--help'
	@echo '  KIND=$(KIND)   what make compare or make stress runs'
	@echo '  START_METHOD=$(START_METHOD)   how the loaders of make test start workers: fork, forkserver or spawn'
	@echo
	@echo 'Targets that use Python first set up .venv (about 5 GB with torch), and keep it until PYTHON or TORCH changes.'

demo: build ## Measure the gain on this machine, and check that training losses stay the same (ARGS=--help)
	$(BIN)/python examples/start/demo $(ARGS)

TEST_RUST := $(CARGO) test --features failpoints
test: build ## Run the tests: Rust, loom, and a short form of all Python tests (8 minutes on two cores)
	$(TEST_RUST)
	@$(MAKE) test-loom test-python

test-all: build ## Run all tests in full, without Ray (40 minutes on two cores)
	$(TEST_RUST)
	@$(MAKE) test-loom test-python LANE=
	$(PYTEST) tests/python -m alone $(ARGS)

# A separate target directory: other RUSTFLAGS in the same one would make cargo rebuild everything each time.
test-loom: ## Run the loom models of the lock-free parts
	RUSTFLAGS="$$RUSTFLAGS --cfg loom" $(CARGO) test --release --target-dir target/loom --test 'loom_*'

# Tests wait about half of the time, so there are two processes per core, up to 8 in all. Each takes 400 MB. A process
# that has run out of tests takes some from another.
JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? 2 * cores : 8)))
PARALLEL := -n $(JOBS) --dist worksteal --max-worker-restart 0 -m 'not alone'

# Most tests fork workers. A fork copies the page tables, which are shorter if malloc asks for huge pages.
FORKS_FASTER := GLIBC_TUNABLES=glibc.malloc.hugetlb=1

# The start method of loaders for which a test sets none. forkserver is the default of Python 3.14.
START_METHOD ?= fork

LANE ?= --short
test-python: build failpoints ## Run a short form of all Python tests (LANE= runs them in full; ARGS='-k name')
	$(FORKS_FASTER) RUSTLOADER_TEST_START_METHOD=$(START_METHOD) $(PYTEST) tests/python $(PARALLEL) $(LANE) $(ARGS)

test-docs: build ## Run the tests of documentation, docstrings, options and packaging in full
	$(PYTEST) tests/python/docs $(PARALLEL) $(ARGS)

# Scheduler, engine, shared memory and codec in Rust; whole loaders, pinning, statistics and the command line in Python.
FAST := parity/test_class parity/test_iteration parity/test_worker unit/test_codec device/test_pinning tools/test_stats \
	tools/test_cli_arguments tools/test_cli_bench_passes
test-fast: build ## Run a subset of the tests, for use during development (a minute on two cores)
	$(TEST_RUST) --lib --test '*_model' --test engine --test garbage
	$(PYTEST) $(FAST:%=tests/python/%.py) $(PARALLEL) --short $(ARGS)

# Prints the kinds of a target, with the comments after their definitions.
kinds = @awk -F ' := [^\#]*\# ' '/^$(1)\.[a-z-]+ := .*\# / { sub(/^$(1)\./, "", $$1); printf "  KIND=%-16s %s\n", $$1, $$2 }' Makefile

# Programs that inject random faults or run random programs, for minutes each. `make test-all` runs a short form of
# each, and `make test` of most.
STRESS.matrix := faults.matrix --all # end a worker in every way, at every place, under every kind of loader
STRESS.restarts := faults.restarts # kill workers that are restarted (ARGS='--leaks 1000': many restarts in one iterator)
STRESS.connections := faults.connections # cut, delay and stall connections to remote workers
STRESS.cache-programs := faults.cache_programs # compare random programs over caches, some of which are killed, with a model
STRESS.ends := faults.ends # interrupt, kill and end main processes at random moments
STRESS.drops := faults.drops # drop iterators at random moments
STRESS.forks := faults.forks # fork while other loaders run
STRESS.failures := faults.failures # make each system call of an epoch fail
STRESS.soak := faults.soak # run random loaders with random faults (ARGS='--minutes 20')
STRESS.batches := roundtrip.fuzz # send random trees of objects through both loaders (ARGS='--trees 20000 --seed 7')
STRESS.programs := differential --coverage # compare random programs on both loaders (ARGS='--programs 5000 --seed 7')
STRESS.resume := stateful.model # compare random programs that save and load states with a model
STRESS.ray := faults.connections --ray --epochs 100000 --minutes 10 # take down nodes of a Ray cluster
STRESS.ray-programs := differential --start-method ray # compare random programs whose workers are actors
STRESS.gpu := faults.device_stress # delay streams and drop batches on a CUDA device
STRESS.gpu-sanitizer := faults.device_stress --small --epochs 1 # run an epoch under compute-sanitizer
STRESS.KINDS := $(sort $(patsubst STRESS.%,%,$(filter-out STRESS.KINDS,$(filter STRESS.%,$(.VARIABLES)))))
SANITIZER ?= compute-sanitizer
stress: build $(if $(filter ray%,$(KIND)),$(RAY)/.made-with) $(if $(filter failures,$(KIND)),failpoints) ## Inject random faults or run random programs: KIND=soak, ends, ... (make stress alone lists them)
ifeq ($(or $(KIND),help),help)
	@echo 'make stress KIND=... (ARGS=--help explains a kind). Each prints the seed of a failure. The kinds:'
	$(call kinds,STRESS)
else ifeq ($(STRESS.$(KIND)),)
	@echo 'error: KIND=$(KIND) is not one of $(STRESS.KINDS)' >&2; exit 1
else ifneq ($(filter ray%,$(KIND)),)
	@$(IN_ITS_OWN_NETWORK) cd tests/lib; "$$@" $(abspath $(RAY))/bin/python -m $(STRESS.$(KIND)) $(ARGS)
else ifeq ($(KIND),gpu-sanitizer)
	@command -v $(SANITIZER) >/dev/null || { echo 'error: $(SANITIZER) was not found. It comes with the CUDA toolkit: put its bin folder on PATH, or set SANITIZER to the path of the program.' >&2; exit 1; }
	cd tests/lib && $(SANITIZER) --target-processes application-only --report-api-errors no --error-exitcode 1 $(abspath $(BIN))/python -m $(STRESS.$(KIND)) $(ARGS)
else
	cd tests/lib && $(abspath $(BIN))/python -m $(STRESS.$(KIND)) $(ARGS)
endif

# gcc's ASan runtime must be loaded before the extension, together with libstdc++: otherwise torch's C++ exceptions
# fail.
ASAN_TESTS := codec tensors leases transport_torch damage
asan: build ## Run the Rust tests and some Python tests under AddressSanitizer (needs a nightly Rust and gcc's libasan)
	RUSTFLAGS="$$RUSTFLAGS -Zsanitizer=address" $(CARGO) +nightly test --tests --no-fail-fast --features failpoints --target $(HOST) --target-dir target/asan
	RUSTFLAGS="$$RUSTFLAGS -Zsanitizer=address" $(CARGO) +nightly build --lib --features python --target $(HOST) --target-dir target/asan
	rm -rf target/asan/python && mkdir target/asan/python && cp -r python/rustloader target/asan/python/
	cp target/asan/$(HOST)/debug/librustloader.so target/asan/python/rustloader/_core.abi3.so
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		PYTHONPATH=target/asan/python $(BIN)/python -m pytest $(ASAN_TESTS:%=tests/python/unit/test_%.py) $(ARGS)

# Each night, for the last day's commits.
SINCE ?= HEAD~10
mutants: build ## Put faults into lines that changed after the commit SINCE, and list those that no test notices (cargo install cargo-mutants)
	@sh scripts/mutants.sh $(VENV) $(SINCE)

# Both programs query databases over the network, so `make lint` does not run them.
audit: $(VENV)/.made-with ## Look for known vulnerabilities in the dependencies (cargo install cargo-audit; needs the network)
	$(CARGO) audit
	$(BIN)/python -m venv target/audit && target/audit/bin/pip install --quiet pip-audit
	target/audit/bin/pip-audit --path $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# Without a CUDA device, all these tests are skipped.
test-gpu: build ## Run the tests that need a CUDA device
	$(PYTEST) tests/python -m gpu $(ARGS)

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

failpoints: target/failpoints/.built ## Build the extension with failpoints, for tests that make system calls fail (not installed)

# The programs of benches/. Each measures what it compares in interleaved rounds of one run.
COMPARE.auto := auto # how soon num_workers="auto" settles
COMPARE.breakdown := breakdown # where the time per batch goes
COMPARE.gpu := gpu to_device # pinned batches, batches on a device
COMPARE.growth := growth # how times grow with workers, leaves and bytes
COMPARE.memory := memory # peak memory
COMPARE.observed := observed # the cost of a trace and of metrics
COMPARE.peers := peers # loaders of other projects
COMPARE.ray := remote # workers on a Ray cluster and local ones
COMPARE.reliability := reliability # how fast faults are detected, and how long shutdowns take
COMPARE.restarts := restarts # the cost of the options against faults
COMPARE.resuming := resuming # the cost of states
COMPARE.rows := compare # the rows of the comparison with torch, the default
COMPARE.scheduling := scheduling # uneven batches, slow storage, large samplers, tables
COMPARE.sequences := sequences # padding, plans, packs
COMPARE.sharing := sharing # what rustloader.share saves and costs
COMPARE.starts := starts # start-up times
COMPARE.verdicts := verdicts # what the remedies of verdicts gain, and whether the verdicts of a loop agree
COMPARE.KINDS := $(sort $(patsubst COMPARE.%,%,$(filter-out COMPARE.KINDS,$(filter COMPARE.%,$(.VARIABLES)))))
compare: build $(if $(filter ray,$(KIND)),$(RAY)/.made-with) ## Compare with torch's DataLoader (ARGS='--quick'), or measure something else (KIND=help lists the kinds)
ifeq ($(KIND),help)
	@echo 'make compare KIND=... (ARGS=--help explains a kind). All have --rows, --rounds and --save FILE. The kinds:'
	$(call kinds,COMPARE)
else ifeq ($(COMPARE.$(or $(KIND),rows)),)
	@echo 'error: KIND=$(KIND) is not one of $(COMPARE.KINDS)' >&2; exit 1
else ifeq ($(KIND),ray)
	@$(IN_ITS_OWN_NETWORK) "$$@" $(RAY)/bin/python benches/remote.py $(ARGS)
else
	@set -ex; for program in $(COMPARE.$(or $(KIND),rows)); do $(BIN)/python benches/$$program.py $(ARGS); done
endif

# Not part of `make test`: the first run needs the network, and a failure may be that of another project.
ecosystem: build $(ECOSYSTEM)/.made-with ## Run Lightning, transformers, timm and nine more on both loaders (another 6 GB)
	$(ECOSYSTEM)/bin/python -m pytest tests/ecosystem $(ARGS)

# Ray listens on all interfaces. If the system allows it, Ray runs in a network namespace that has only the loopback.
ALONE := unshare --net --map-root-user sh -c 'ip link set lo up && exec "$$@"' alone
IN_ITS_OWN_NETWORK = if $(ALONE) true 2>/dev/null; then set -- $(ALONE); else set --; fi; set -x;
test-ray: build $(RAY)/.made-with ## Run the tests of workers on a small Ray cluster (another 300 MB)
	@$(IN_ITS_OWN_NETWORK) "$$@" $(RAY)/bin/python -m pytest tests/ray -W default $(ARGS)

wheel: $(VENV)/.made-with ## Build a wheel into dist/
	$(BIN)/maturin build --release --out dist

# zig links for both architectures and for an old glibc, so that the wheels install on other systems than this one.
DIST := target/dist-tools
DIST_TARGETS ?= x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
dist: $(VENV)/.made-with ## Build and check a release in dist/: wheels for Linux and their symbols, the wheel for macOS and Windows, the sdist
	rm -rf dist
	$(PYTHON) -m venv $(DIST) && $(DIST)/bin/pip install --quiet 'maturin[zig]>=1.9.4,<2' twine abi3audit
	rustup target add $(DIST_TARGETS)
	set -ex; for target in $(DIST_TARGETS); do PATH="$(CURDIR)/$(DIST)/bin:$$PATH" maturin build --profile dist --locked --out dist \
		--zig --target $$target --compatibility manylinux_2_28; done
	$(BIN)/python scripts/split_symbols.py dist/*.whl
	$(BIN)/python scripts/pure_wheel.py dist/*manylinux*x86_64.whl
	$(DIST)/bin/maturin sdist --out dist
	$(DIST)/bin/twine check --strict dist/*.whl dist/*.tar.gz
	$(DIST)/bin/abi3audit --strict dist/*-abi3-*.whl

# The site is built from the sources alone, in a separate environment without torch.
DOCS := target/docs
docs: $(DOCS)/.made ## Build the documentation's site in target/site; a dead link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)

$(DOCS)/.made: pyproject.toml
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/pip --disable-pip-version-check install --quiet $$($(PYTHON) -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

clean: ## Remove everything that make created: .venv, builds, caches, the demo's images
	rm -rf .venv .venv-ecosystem .venv-ray target dist .mypy_cache .pytest_cache .ruff_cache .hypothesis examples/start/data demo.png
	rm -f python/rustloader/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up -----------------------------------------------------------------------------------------------------

build: $(VENV)/.built ## Build the extension and install it into .venv

# .made-with records the PYTHON and TORCH that .venv was made with. If they differ from the current ones, or the Python
# of .venv no longer exists, scripts/venv.sh runs again and updates .venv.
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
