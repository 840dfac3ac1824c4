# SPDX-License-Identifier: Apache-2.0
"""Plugin that prints the memory of a pytest run: ``-p footprint``, from tests/.

Counts pytest, its workers, and everything that the tests start.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress

import psutil
import pytest

_EVERY_S = 0.25
_SHOWN = 12


class Footprint:
    """Memory of this process and its descendants, by the test files that were running."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._running: dict[str, float] = {}  # test id: start time
        self._seconds: dict[str, float] = {}  # per file, over its tests
        self._peaks: dict[str, int] = {}  # bytes, per file while its tests ran
        self._highest = 0  # bytes

    def sample(self) -> None:
        """Measures the memory once, for the running files."""
        held = _held_by_all()
        self._highest = max(self._highest, held)
        for nodeid in list(self._running):
            file = nodeid.partition("::")[0]
            self._peaks[file] = max(self._peaks.get(file, 0), held)

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_S):
            self.sample()

    def pytest_sessionstart(self) -> None:
        self._thread.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        file = nodeid.partition("::")[0]
        taken = time.monotonic() - self._running.pop(nodeid)
        self._seconds[file] = self._seconds.get(file, 0.0) + taken

    def pytest_sessionfinish(self) -> None:
        self._done.set()
        self._thread.join()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"memory: {self._highest / 2**30:.2f} GiB at most")
        highest_first = sorted(self._peaks.items(), key=lambda item: -item[1])
        for file, peak in highest_first[:_SHOWN]:
            seconds = self._seconds.get(file, 0.0)
            terminalreporter.write_line(f"{peak / 2**20:7.0f} MiB {seconds:6.0f} s  {file}")


def _held_by_all() -> int:
    """Returns the bytes of this process and its descendants."""
    here = psutil.Process()
    total = 0
    for process in [here, *here.children(recursive=True)]:
        with suppress(psutil.Error):  # it has just ended
            total += _held(process)
    return total


def _held(process: psutil.Process) -> int:
    """Returns one process's bytes: on Linux its share of shared memory, elsewhere all."""
    if sys.platform == "linux":
        return int(process.memory_full_info().pss)
    return int(process.memory_info().rss)


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Footprint())
