# SPDX-License-Identifier: Apache-2.0
"""Workers fit the cores and the memory; last lines say what was skipped and what took long."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from closing import GIB, num_workers

TESTS = Path(__file__).parent


@pytest.mark.parametrize(
    ("cores", "gib", "workers"),
    [(2, 20, 2), (4, 13, 3), (4, 64, 4), (3, 5.5, 1), (8, 1, 1), (1, 100, 1)],
)
def test_workers_are_as_many_as_cores_and_free_memory_allow(cores, gib, workers):
    assert num_workers(cores, int(gib * GIB)) == workers


def test_a_run_says_who_shares_it_what_it_skipped_and_what_took_long(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_long.py").write_text("import time\ndef test_it(): time.sleep(0.3)")
    skipping = "import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n):\n"
    (folder / "test_skipping.py").write_text(f"{skipping}    pytest.skip('no redis-server')")
    (folder / "conftest.py").write_text(
        "from closing import pytest_report_header, pytest_xdist_auto_num_workers\n"
        "from closing import say_what_ran as pytest_terminal_summary\n"
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
    assert done.returncode == 0, done.stdout
    assert re.search(r"^workers: \d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^=+ \d+\.\d minutes, 3 skipped =+$", done.stdout, re.MULTILINE)
    assert "\n3 skipped: no redis-server\n" in done.stdout
    assert re.search(r"^ +0\.\d s  tests/test_long\.py\n", done.stdout, re.MULTILINE)
    assert re.search(r"^ +0\.\d s  2 files, one after the other$", done.stdout, re.MULTILINE)
