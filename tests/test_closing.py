# SPDX-License-Identifier: Apache-2.0
"""Workers fit cores and memory; the last lines have verdict, skips and largest files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from closing import GIB, cores, free_bytes, num_workers

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("cores", "gib", "workers"),
    [(2, 20, 2), (4, 13, 3), (4, 64, 4), (3, 5.5, 1), (8, 1, 1), (1, 100, 1)],
)
def test_workers_are_as_many_as_cores_and_free_memory_allow(cores, gib, workers):
    assert num_workers(cores, int(gib * GIB)) == workers


def groups(folder, own, **files):
    """Makes control groups as on Linux: files by "group:name"; returns (root, own)."""
    for where, text in files.items():
        group, _, name = where.partition(":")
        (folder / group).mkdir(parents=True, exist_ok=True)
        (folder / group / name).write_text(text)
    (folder / "own").write_text(own)
    return folder, folder / "own"


@pytest.mark.parametrize(
    ("own", "files", "found"),
    [
        ("0::/", {".:cpu.max": "150000 100000"}, 1),
        ("0::/a/b", {"a:cpu.max": "100000 100000", "a/b:cpu.max": "max 100000"}, 1),
        ("4:cpu,cpuacct:/a", {"cpu,cpuacct/a:cpu.cfs_quota_us": "-1"}, None),
        ("4:cpu:/a", {"cpu/a:cpu.cfs_quota_us": "50000", "cpu/a:cpu.cfs_period_us": "50000"}, 1),
        ("", {}, None),
    ],
)
def test_cores_are_those_of_the_quota_too(tmp_path, own, files, found):
    there = cores(tmp_path / "none", tmp_path / "none")
    assert cores(*groups(tmp_path, own, **files)) == (found or there)


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        ("0::/a", {"a:memory.max": "9000", "a:memory.current": "5000"}, 4000),
        (
            "3:memory:/a",
            {
                "memory/a:memory.limit_in_bytes": "9000",
                "memory/a:memory.usage_in_bytes": "8000",
                "memory/a:memory.stat": "cache 3000\ninactive_file 2000",
            },
            3000,
        ),
        ("0::/a", {"a:memory.max": "1000", "a:memory.current": "5000"}, 0),
    ],
)
def test_free_memory_is_that_of_the_limit(tmp_path, own, files, free):
    assert free_bytes(*groups(tmp_path, own, **files)) == free


def test_without_a_limit_free_memory_is_the_machine_s(tmp_path):
    unlimited = groups(tmp_path, "0::/a", **{"a:memory.max": "max"})
    assert free_bytes(*unlimited) > GIB // 8


@pytest.mark.parametrize(("reason", "status"), [("no redis-server here", 0), ("it is late", 1)])
def test_a_run_says_who_shares_it_what_it_skipped_and_what_took_long(tmp_path, reason, status):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_busy.py").write_text("def test_it(): sum(range(10**7))")
    skipping = "import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n):\n"
    (folder / "test_skipping.py").write_text(f"{skipping}    pytest.skip('{reason}')")
    (folder / "conftest.py").write_text(
        "from closing import pytest_report_header, pytest_xdist_auto_num_workers\n"
        "from closing import Costs, fail_if_skipped_otherwise, say_what_ran\n"
        "costs = Costs()\n"
        "def pytest_sessionfinish(session): fail_if_skipped_otherwise(session)\n"
        "def pytest_configure(config): config.pluginmanager.register(costs)\n"
        "def pytest_terminal_summary(terminalreporter): say_what_ran(terminalreporter, costs)\n"
    )
    command = [sys.executable, "-m", "pytest", "-n", "auto", "tests"]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout
    assert ("not among the REASONS" in done.stdout) == bool(status)
    assert re.search(r"^workers: \d+$", done.stdout, re.MULTILINE)
    verdict = r"^=+ 1 passed, 0 failed, 0 error, 3 skipped in \d+\.\d minutes =+$"
    assert re.search(verdict, done.stdout, re.MULTILINE)
    assert f"\n3 skipped: {reason}\n" in done.stdout
    assert re.search(r"^ +\d\.\d s  tests/test_busy\.py\n", done.stdout, re.MULTILINE)
    assert re.search(r"^ +\d+\.\d s  user \+ sys of all 4$", done.stdout, re.MULTILINE)
