# SPDX-License-Identifier: Apache-2.0
"""Chooses workers, and reports the verdict, skips, time and slowest files of a test run."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

GIB = 2**30
#: Memory of a worker and its children: the largest file took 3.4 GiB.
WORKER_BYTES = 4 * GIB
#: Mount point of control groups, and the file with this process's groups.
CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: User and system seconds per file, which workers report to the controller.
SPENT = "processor_seconds"
#: Allowed skip reasons: root, a missing package, the platform, a missing library feature,
#: a run's end. Any other reason fails the run.
REASONS = re.compile(
    r"\broot\b|installed|installs|no redis-server|needs qemu|namespaces need|namespaces are not"
    r"|its parser needs|pip cannot get|npm does not get|kept of the archive"
    r"|\bmacOS|\bMacs?\b|\bLinux|Metal device|CPU device|such kernels|calls clang"
    r"|transformers' class|minutes that this run may take"
)
_BEGUN = time.monotonic()
_SHOWN = 10
_VERDICTS = ("passed", "failed", "error", "skipped")


class Costs:
    """CPU seconds by file, of this process and its reaped children."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._before = 0.0
        self._has_workers = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self):
        found = yield
        self._count("collection")
        return found

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        done = yield
        self._count(item.nodeid.partition("::")[0])
        return done

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._count("the end")
        if (output := getattr(session.config, "workeroutput", None)) is not None:
            output[SPENT] = dict(self.seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error) -> None:
        self.seconds.update(getattr(node, "workeroutput", {}).get(SPENT, {}))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_setupnodes(self) -> None:
        self._has_workers = True

    def _count(self, name: str) -> None:
        # Workers are children of the controller, and report their own time.
        now = sum(os.times()[: 2 if self._has_workers else 4])
        self.seconds[name] += now - self._before
        self._before = now


def cores(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """Returns the number of usable cores, by affinity and control group quotas."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = [
        int(used) / int(period)
        for used, period in _quotas(cgroups, own)
        if used.isdigit() and int(period)
    ]
    return max(1, int(min([there or 1, *quotas])))


def _quotas(cgroups: Path, own: Path) -> Iterable[tuple[str, str]]:
    """Yields quota and period of every control group above this process; "max" or "-1" for none."""
    for folder in _groups(cgroups, own, "cpu"):
        if both := _read(folder / "cpu.max").split():
            yield both[0], both[1]
        if quota := _read(folder / "cpu.cfs_quota_us"):
            yield quota, _read(folder / "cpu.cfs_period_us") or "100000"


def free_bytes(cgroups: Path = CGROUPS, own: Path = OWN) -> int:
    """Returns the bytes still available, by the machine and control group limits."""
    found = [psutil.virtual_memory().available]
    for folder in _groups(cgroups, own, "memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            if (most := _read(folder / limit)).isdigit():
                files = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
                held = int(_read(folder / used) or 0) - int(files.get("inactive_file", 0))
                found.append(max(0, int(most) - held))
    return min(found)


def _groups(cgroups: Path, own: Path, controller: str) -> list[Path]:
    """Returns this process's control group folders and their ancestors, in both versions."""
    found = []
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            mount = cgroups / controller if controllers else cgroups
            folder = mount / path.lstrip("/")
            found += [each for each in (folder, *folder.parents) if each.is_relative_to(mount)]
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def num_workers(cores: int, free_bytes: int) -> int:
    """Returns one worker per core if free memory suffices, at least one."""
    return max(1, min(cores, free_bytes // WORKER_BYTES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Defines `-n auto`, which the Makefile's commands use."""
    return num_workers(cores(), free_bytes())


def pytest_report_header(config: pytest.Config) -> str:
    """Reports the number of workers."""
    return f"workers: {config.getoption('numprocesses', None) or 'none but pytest itself'}"


def reported(terminalreporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    """Returns all test and fixture reports."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    return [report for report in reports if isinstance(report, pytest.TestReport)]


def say_what_ran(terminalreporter: pytest.TerminalReporter, costs: Costs) -> None:
    """Prints the verdict, duration, skip reasons and slowest files."""
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in _VERDICTS}
    minutes = (time.monotonic() - _BEGUN) / 60
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    terminalreporter.section(f"{said} in {minutes:.1f} minutes")
    skipped = terminalreporter.stats.get("skipped", [])
    for line in left_out(skipped) + largest(costs.seconds):
        terminalreporter.write_line(line)


def left_out(skipped: Iterable[pytest.TestReport]) -> list[str]:
    """Counts skipped tests by reason, the most frequent first."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in skipped
        if isinstance(report.longrepr, tuple)
    )
    return [f"{count} skipped: {reason}" for reason, count in reasons.most_common()]


def fail_if_skipped_otherwise(session: pytest.Session) -> None:
    """Fails a run that skipped a test for a reason outside REASONS, and prints it."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if unknown := [line for line in left_out(skipped) if not REASONS.search(line)]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        reporter.write_line("\n".join(["", *unknown, "not among the REASONS of tests/closing.py"]))


def largest(seconds: Counter[str]) -> list[str]:
    """Formats the files with the most CPU time, and the total."""
    lines = [f"{took:6.1f} s  {file}" for file, took in seconds.most_common(_SHOWN)]
    return [*lines, f"{seconds.total():6.1f} s  user + sys of all {len(seconds)}"]
