# SPDX-License-Identifier: Apache-2.0
# Every target sets up .venv first where needed; `make` alone lists them.

PLATFORM := $(if $(filter Darwin,$(shell uname -s)),macos,linux)
# Interpreter for .venv; empty: scripts/setup.sh looks for one.
PYTHON ?=
# Linux: where CPU builds of torch are, if pip is not configured to find one.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# A copy of vLLM's source distribution (requirements/vllm.txt), not to download it.
VLLM_SDIST ?=
# Where a copy of dist/ will lie; `make dist` writes it into dist/install.sh.
ADDRESS ?=
# More arguments for pytest, e.g. PYTEST_ARGS="-k sampler".
PYTEST_ARGS ?=
# Of `make fuzz`: a seed and its options, as a failure prints them, or others (FUZZ=--help).
FUZZ ?= --requests 10000
# Processes that share the test files; auto: one a core where memory allows (tests/closing.py);
# 0: none but pytest's own, for a debugger.
PYTEST_WORKERS ?= auto

# The environment is rebuilt when the content of what defines it changes, not its date. It comes in
# two parts: what users need to serve, and what tests and benchmarks need besides.
SETUP_INPUTS := pyproject.toml scripts/setup.sh scripts/vllm_wheel.py requirements/$(PLATFORM).txt requirements/vllm.txt
SUM := $(shell cat $(SETUP_INPUTS) 2>/dev/null | cksum | cut -d ' ' -f 1)
DEV_SUM := $(shell cat $(SETUP_INPUTS) requirements/$(PLATFORM)-dev.txt interpreter/pyproject.toml | cksum | cut -d ' ' -f 1)
USERS_STAMP := .venv/.installed-$(SUM)
STAMP := .venv/.developers-$(DEV_SUM)
BIN := .venv/bin
LOCKS_SUM := cat requirements/*.txt requirements/*.in | cksum

# vLLM starts in half the time from bytecode; some environments ask Python not to keep any.
unexport PYTHONDONTWRITEBYTECODE
# Once set up, nothing needs the network.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

ifeq ($(PLATFORM),linux)
demo bench: export VLLM_METAL_DEVICE := cpu
endif

.PHONY: help setup setup-dev demo test test-more test-slow test-fresh fuzz vllm-tests lint format bench dist lock check-locks check-changed-locks clean distclean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-11s %s\n", $$1, $$2}'

setup: $(USERS_STAMP)  ## create .venv, all that serving takes (two to four minutes once, nothing after)

setup-dev: $(STAMP)  ## add what tests and benchmarks need; their targets do so by themselves

$(USERS_STAMP):
	@PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' VLLM_SDIST='$(VLLM_SDIST)' scripts/setup.sh
	@rm -f .venv/.installed-* && touch $@

$(STAMP): $(USERS_STAMP)
	@scripts/setup.sh --dev
	@rm -f .venv/.developers-* && touch $@

demo: $(USERS_STAMP)  ## serve a small model and talk to it (on Linux: MLX's CPU backend)
	$(BIN)/python examples/demo.py

# Files are dealt to the workers, the long ones first (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder

# Lint runs beside the tests, says nothing where all is well, and fails the command as well.
test: $(STAMP)  ## the one test command: lint, types, tests
	@said=$$(mktemp); $(MAKE) --no-print-directory lint >"$$said" 2>&1 & lint=$$!; \
	$(PYTEST) $(PYTEST_ARGS); tests=$$?; \
	wait $$lint; linted=$$?; [ $$linted = 0 ] || cat "$$said"; rm -f "$$said"; \
	exit $$((tests ? tests : linted))

test-more: $(STAMP)  ## what CI runs besides: the rest of the end-to-end tests
	$(PYTEST) -m 'more and not slow' $(PYTEST_ARGS)

test-slow: $(STAMP)  ## the nightly tests: all models and settings
	$(PYTEST) -m slow $(PYTEST_ARGS)

# What reads the platform, or takes what it says from what does. The interpreter's compiler sees Linux
# under the double: what differs is how it finds the lines of kernels.
DARWIN_TESTS := tests/cli/doctor tests/device/test_blas.py tests/cli/test_main.py \
	tests/test_cpu.py tests/settings/test_envs.py tests/settings/test_local_network.py \
	tests/engine/memory/test_planner.py tests/engine/memory/test_pressure.py tests/engine/memory/test_budget.py \
	tests/platform tests/device/test_ram.py tests/device/test_selfcheck.py tests/device/test_sysctl.py \
	tests/patches/vllm_patches/test_logs.py tests/patches/vllm_patches/test_processes.py \
	tests/patches/vllm_patches/test_releases.py tests/kv_transfer/peer/test_wire.py \
	tests/metal_interpreter/test_checker.py tests/metal_interpreter/test_coverage.py

.PHONY: test-small test-darwin

test-small: lint  ## those that fit a machine of 7 GB, and how much memory they took
	PYTHONPATH=tests $(PYTEST) -p footprint -m 'not slow and not heavy' $(PYTEST_ARGS)

test-darwin: $(STAMP)  ## those that read the platform, under a double of macOS (Linux)
	$(BIN)/python tests/darwin/run.py -m pytest -n $(PYTEST_WORKERS) --dist loadfile \
		--no-loadscope-reorder \
		-m 'not slow' $(PYTEST_ARGS) $(DARWIN_TESTS)

test-fresh: $(STAMP)  ## property tests with examples that no run has drawn before
	$(PYTEST) -m 'hypothesis and not slow' --hypothesis-profile fresh $(PYTEST_ARGS)

fuzz: $(STAMP)  ## random traffic on the real engine, 10 000 requests
	PYTHONPATH=tests $(BIN)/python -m e2e.fuzz $(FUZZ)

vllm-tests: $(STAMP)  ## vLLM's own engine tests with this platform (fetched once, 45 MB)
	PYTHONPATH=tests $(BIN)/python -m upstream.run $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff and mypy, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)  ## rewrite the sources with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## the benchmarks, the long one shortened: prints tables, writes JSON and plots
	$(BIN)/python benchmarks/peers.py --quick
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/prefix_repetition.py --quick
	$(BIN)/python benchmarks/speculation.py --quick
	$(BIN)/python benchmarks/hybrids.py --quick
	$(BIN)/python benchmarks/kv_disk.py --quick
	$(BIN)/python benchmarks/disaggregated.py --quick
	$(BIN)/python benchmarks/cache_quality.py --quick
	$(BIN)/python benchmarks/kernel_traffic.py

dist: $(USERS_STAMP)  ## a release in dist/: wheel, source archive, install.sh (ADDRESS=https://...: where it will lie)
	@ADDRESS='$(ADDRESS)' scripts/dist.sh

lock:  ## resolve requirements/{linux,macos}{,-dev}.txt again (Linux, after make setup-dev)
	scripts/lock.sh

# The sum says of which files it is true, so that CI asks again where they changed.
check-locks: $(STAMP)  ## whether they hold together, on arm64 and other Pythons too (Linux, asks the index)
	scripts/lock.sh --check macos linux
	@$(LOCKS_SUM) >requirements/checked

# For CI: nothing where they are as they were when last checked.
check-changed-locks:
	@[ "$$($(LOCKS_SUM))" = "$$(cat requirements/checked)" ] || $(MAKE) check-locks

clean:  ## remove build products and caches
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find vllm_metal metal_kernels interpreter tests benchmarks examples -name __pycache__ -prune \
		-exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## remove .venv and the user's cache folder as well
	@scripts/distclean.sh
