# SPDX-License-Identifier: Apache-2.0
"""What a run of tests says of itself: who shares the files, what was skipped, how long it took."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable

import psutil
import pytest

GIB = 2**30
#: Memory that a worker may take with all it starts: the most that a file took was 3.4 GiB.
WORKER_BYTES = 4 * GIB
_BEGUN = time.monotonic()
_SHOWN = 10


def num_workers(cores: int, free_bytes: int) -> int:
    """As many as there are cores, and as free memory has room for; one at least."""
    return max(1, min(cores, free_bytes // WORKER_BYTES))


def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`, which is what the commands of the Makefile ask for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return num_workers(cores or 1, psutil.virtual_memory().available)


def pytest_report_header(config: pytest.Config) -> str:
    """Says who shares the work, whatever chose the number."""
    return f"workers: {config.getoption('numprocesses', None) or 'none but pytest itself'}"


def reported(terminalreporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    """Every report of a test, of its fixtures too."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    return [report for report in reports if isinstance(report, pytest.TestReport)]


def say_what_ran(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how long the run took, the reasons of what was skipped, and the longest files."""
    skipped = terminalreporter.stats.get("skipped", [])
    minutes = (time.monotonic() - _BEGUN) / 60
    terminalreporter.section(f"{minutes:.1f} minutes, {len(skipped)} skipped")
    for line in left_out(skipped) + longest(reported(terminalreporter)):
        terminalreporter.write_line(line)


def left_out(skipped: Iterable[pytest.TestReport]) -> list[str]:
    """How many tests were skipped and why, the most frequent reason first."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in skipped
        if isinstance(report.longrepr, tuple)
    )
    return [f"{count} skipped: {reason}" for reason, count in reasons.most_common()]


def longest(reports: Iterable[pytest.TestReport]) -> list[str]:
    """The files that took longest, fixtures included, and all of them together."""
    seconds: Counter[str] = Counter()
    for report in reports:
        seconds[report.nodeid.partition("::")[0]] += report.duration
    lines = [f"{took:6.1f} s  {file}" for file, took in seconds.most_common(_SHOWN)]
    return [*lines, f"{seconds.total():6.1f} s  {len(seconds)} files, one after the other"]
