# SPDX-License-Identifier: Apache-2.0
# Every target sets up .venv first where needed; `make` alone lists them.

PLATFORM := $(if $(filter Darwin,$(shell uname -s)),macos,linux)
# Interpreter for .venv; empty: chosen by scripts/setup.sh.
PYTHON ?=
# Linux: index of torch's CPU builds, if pip is not configured to find one.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# A copy of vLLM's source distribution (requirements/vllm.txt), to avoid the download.
VLLM_SDIST ?=
# Future address of a copy of dist/; `make dist` writes it into dist/install.sh.
ADDRESS ?=
# More arguments for pytest, e.g. PYTEST_ARGS="-k sampler".
PYTEST_ARGS ?=
# Arguments of `make fuzz`: a seed and its options, as a failure prints them, or others (FUZZ=--help).
FUZZ ?= --requests 10000
# Test processes; auto: one per core where memory allows (tests/closing.py);
# 0: no workers, for a debugger.
PYTEST_WORKERS ?= auto

# The environment is rebuilt when the contents of its definition change, not the date. It has
# two parts: what serving needs, and what tests and benchmarks add.
SETUP_INPUTS := pyproject.toml scripts/setup.sh scripts/vllm_wheel.py requirements/$(PLATFORM).txt requirements/vllm.txt
SUM := $(shell cat $(SETUP_INPUTS) 2>/dev/null | cksum | cut -d ' ' -f 1)
DEV_SUM := $(shell cat $(SETUP_INPUTS) requirements/$(PLATFORM)-dev.txt interpreter/pyproject.toml | cksum | cut -d ' ' -f 1)
USERS_STAMP := .venv/.installed-$(SUM)
STAMP := .venv/.developers-$(DEV_SUM)
BIN := .venv/bin
LOCKS_SUM := cat requirements/*.txt requirements/*.in | cksum

# Bytecode halves vLLM's start; some environments tell Python not to write any.
unexport PYTHONDONTWRITEBYTECODE
# After setup, no network is needed.
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

setup: $(USERS_STAMP)  ## create .venv for serving (two to four minutes the first time)

setup-dev: $(STAMP)  ## add what tests and benchmarks need (their targets do this too)

$(USERS_STAMP):
	@PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' VLLM_SDIST='$(VLLM_SDIST)' scripts/setup.sh
	@rm -f .venv/.installed-* && touch $@

$(STAMP): $(USERS_STAMP)
	@scripts/setup.sh --dev
	@rm -f .venv/.developers-* && touch $@

demo: $(USERS_STAMP)  ## run a scripted chat with a small model (on Linux: MLX's CPU backend)
	$(BIN)/python examples/demo.py

# Workers get whole files, the long ones first (tests/conftest.py).
PYTEST := $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --no-loadscope-reorder

# Lint runs beside the tests, prints only errors, and fails the command too.
test: $(STAMP)  ## lint, types and tests
	@said=$$(mktemp); $(MAKE) --no-print-directory lint >"$$said" 2>&1 & lint=$$!; \
	$(PYTEST) $(PYTEST_ARGS); tests=$$?; \
	wait $$lint; linted=$$?; [ $$linted = 0 ] || cat "$$said"; rm -f "$$said"; \
	exit $$((tests ? tests : linted))

test-more: $(STAMP)  ## the remaining end-to-end tests, which CI also runs
	$(PYTEST) -m 'more and not slow' $(PYTEST_ARGS)

test-slow: $(STAMP)  ## the nightly tests: all models and settings
	$(PYTEST) -m slow $(PYTEST_ARGS)

# Tests that read the platform or depend on it. The interpreter's compiler sees Linux
# under the double; only the lookup of kernel lines differs.
DARWIN_TESTS := tests/cli/doctor tests/device/test_blas.py tests/cli/test_main.py \
	tests/test_cpu.py tests/settings/test_envs.py tests/settings/test_local_network.py \
	tests/engine/memory/test_planner.py tests/engine/memory/test_pressure.py tests/engine/memory/test_budget.py \
	tests/platform tests/device/test_ram.py tests/device/test_selfcheck.py tests/device/test_sysctl.py \
	tests/patches/vllm_patches/test_logs.py tests/patches/vllm_patches/test_processes.py \
	tests/patches/vllm_patches/test_releases.py tests/kv_transfer/peer/test_wire.py \
	tests/metal_interpreter/test_checker.py tests/metal_interpreter/test_coverage.py

.PHONY: test-small test-darwin

test-small: lint  ## the tests that fit a machine with 7 GB; prints their memory
	PYTHONPATH=tests $(PYTEST) -p footprint -m 'not slow and not heavy' $(PYTEST_ARGS)

test-darwin: $(STAMP)  ## tests that read the platform, under a macOS test double (Linux)
	$(BIN)/python tests/darwin/run.py -m pytest -n $(PYTEST_WORKERS) --dist loadfile \
		--no-loadscope-reorder \
		-m 'not slow' $(PYTEST_ARGS) $(DARWIN_TESTS)

test-fresh: $(STAMP)  ## property tests with new random examples
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

bench: $(STAMP)  ## the benchmarks, long ones shortened: prints tables, writes JSON and plots
	$(BIN)/python benchmarks/peers.py --quick
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/prefix_repetition.py --quick
	$(BIN)/python benchmarks/speculation.py --quick
	$(BIN)/python benchmarks/hybrids.py --quick
	$(BIN)/python benchmarks/kv_disk.py --quick
	$(BIN)/python benchmarks/disaggregated.py --quick
	$(BIN)/python benchmarks/cache_quality.py --quick
	$(BIN)/python benchmarks/kernel_traffic.py

dist: $(USERS_STAMP)  ## build a release in dist/: wheel, source archive, install.sh (ADDRESS=https://...: its future address)
	@ADDRESS='$(ADDRESS)' scripts/dist.sh

lock:  ## renew requirements/{linux,macos}{,-dev}.txt (Linux, after make setup-dev)
	scripts/lock.sh

# The checksum covers the files that were checked, so that CI repeats the check only for changes.
check-locks: $(STAMP)  ## check the lock files, for arm64 and other Pythons too (Linux, uses the index)
	scripts/lock.sh --check macos linux
	@$(LOCKS_SUM) >requirements/checked

# For CI: no-op if the files are unchanged since the last check.
check-changed-locks:
	@[ "$$($(LOCKS_SUM))" = "$$(cat requirements/checked)" ] || $(MAKE) check-locks

clean:  ## remove build products and caches
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find vllm_metal metal_kernels interpreter tests benchmarks examples -name __pycache__ -prune \
		-exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## remove .venv and the user's cache folder as well
	@scripts/distclean.sh
