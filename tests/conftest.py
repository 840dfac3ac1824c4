# SPDX-License-Identifier: Apache-2.0
"""Before anything imports MLX: its CPU device at full precision, and no network."""

import gc
import os
import signal

import pytest
from closing import (  # pytest finds its hooks here
    pytest_report_header,  # noqa: F401
    pytest_xdist_auto_num_workers,  # noqa: F401
    reported,
    say_what_ran,
)
from cpu import use_cpu
from models.left_out import LEFT_OUT
from selection import COLLECTED, LONG_FIRST, TESTS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# xdist's workers share the cores. A BLAS that takes them all in each worker mostly waits for its
# threads: two workers on two cores took three times the processor time of one thread each.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    threads = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
use_cpu()
# What a shell starts in the background ignores Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps what was collected, before a command selects, and deals long files out first."""
    config.stash[COLLECTED] = list(items)
    items.sort(key=lambda item: item.path.relative_to(TESTS).parts[0] not in LONG_FIRST)


def pytest_collection_finish() -> None:
    """Has the collector pass over what stays for as long as the process does.

    Each engine that ends in a test's process collects some seven times, and thaws what is frozen:
    passes over a million objects of torch, vLLM and pytest took nine tenths of an engine's test.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    gc.get_freeze_count = lambda: 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names what no run compares with transformers, after one that compares all the rest; then how
    long it took, and what was skipped."""
    nodes = [report.nodeid for report in reported(terminalreporter)]
    if any("models/test_published_config.py" in node for node in nodes):
        terminalreporter.section("families without a small model of transformers'")
        for name, reason in LEFT_OUT.items():
            terminalreporter.write_line(f"{name}: {reason}")
    say_what_ran(terminalreporter)
