# SPDX-License-Identifier: Apache-2.0
"""Sets MLX's CPU device, full precision, no network and a run folder before MLX is imported."""

import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from closing import (  # pytest finds its hooks here
    Costs,
    cores,
    fail_if_skipped_otherwise,
    pytest_report_header,  # noqa: F401
    pytest_xdist_auto_num_workers,  # noqa: F401
    say_what_ran,
)
from cpu import use_cpu
from hypothesis.internal.conjecture import providers
from precompiled import kernels, precompile, writable

TESTS = Path(__file__).parent
#: Folders of files that take about a minute, which no worker should get last.
LONG_FIRST = ("e2e", "upstream", "darwin", "cli", "deploy", "examples")
COSTS = Costs()

# Collection creates a million permanent objects: garbage collection of them is wasted.
gc.disable()
_freeze = gc.freeze
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Writers of published formats, used as references, would compile with g++. That takes seconds, and
# cannot link if this environment's path has a space.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
# xdist's workers share the cores. A BLAS with threads for all cores in each worker mostly waits:
# two workers on two cores took three times the CPU time of one thread each.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = cores() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
# Ignore caches of earlier runs and of the user, and leave nothing behind. Workers
# inherit the folder, so that they share what they compile.
RUN_FOLDER = None
if "PYTEST_XDIST_WORKER" not in os.environ:
    RUN_FOLDER = tempfile.mkdtemp(prefix="vllm-metal-tests-")
    os.environ["VLLM_METAL_CACHE"] = f"{RUN_FOLDER}/vllm-metal"
    os.environ["XDG_CACHE_HOME"] = os.environ["XDG_CONFIG_HOME"] = RUN_FOLDER
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{RUN_FOLDER}/hypothesis"
    if not writable(kernels()):  # MLX compiled kernels there for another user
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = RUN_FOLDER
    precompile()
use_cpu()
# Background processes of a shell ignore Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Property tests use the same examples in every run. `--hypothesis-profile fresh`, run nightly, uses
# new ones; a failure becomes an explicit example with its fix.
_SLOW = [hypothesis.HealthCheck.too_slow]  # depends on the clock
hypothesis.settings.register_profile(
    "same",
    max_examples=50,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=_SLOW,
)
hypothesis.settings.register_profile(
    "fresh", parent=hypothesis.settings.get_profile("same"), derandomize=False, print_blob=True
)
hypothesis.settings.load_profile("same")
# It also uses constants from currently loaded modules, which depend on
# earlier tests.
providers.is_local_module_file = lambda _: False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle",
        metavar="SEED",
        help="run files, and the tests of each, in a random order: no test may need another",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skips files whose tests a command deselects entirely, before importing them."""
    if collection_path.suffix != ".py":
        return None
    whole = re.search(r"^pytestmark = pytest\.mark\.(\w+)$", collection_path.read_text(), re.M)
    return True if whole and f"not {whole[1]}" in config.option.markexpr else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders long files first, or shuffles."""
    if seed := config.getoption("--shuffle"):
        drawn = random.Random(seed)
        files = {path: drawn.random() for path in sorted({item.path for item in items})}
        items.sort(key=lambda item: (files[item.path], drawn.random()))
        return
    items.sort(key=lambda item: item.path.relative_to(TESTS).parts[0] not in LONG_FIRST)


def seed() -> None:
    """Makes unseeded random numbers reproducible: MLX's generator starts from the clock."""
    import mlx.core as mx  # after use_cpu

    random.seed(0)
    np.random.seed(0)
    mx.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    seed()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(COSTS)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    fail_if_skipped_otherwise(session)


def pytest_unconfigure() -> None:
    if RUN_FOLDER is not None:
        shutil.rmtree(RUN_FOLDER, ignore_errors=True)


def pytest_collection_finish() -> None:
    """Lets the collector run again, without the objects from collecting the tests."""
    # Reading sources makes many objects at once: by default, each 70,000 of them cause a pass over
    # all that the file's tests left.
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
    gc.freeze = gc.unfreeze = lambda: None
    gc.get_freeze_count = lambda: 0


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Exempts what earlier files left in this process from garbage collection.

    Each engine that ends in a test's process collects some seven times, and thaws what is frozen:
    passes over a million objects of torch, vLLM and pytest took a third of all processor time.
    """
    gc.collect()
    _freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    say_what_ran(terminalreporter, COSTS)
