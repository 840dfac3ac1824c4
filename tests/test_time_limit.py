# SPDX-License-Identifier: Apache-2.0
"""A run past its time limit skips the remaining tests and reports them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

_FILE = """
import time
import pytest

@pytest.fixture(scope="module")
def engine():
    raise AssertionError("made for nothing")

def test_first(): time.sleep(0.2)
def test_second(engine): ...
"""


@pytest.mark.parametrize("workers", ["0", pytest.param("1", marks=pytest.mark.more)])
def test_what_begins_too_late_is_skipped(tmp_path, workers):
    (tmp_path / "test_two.py").write_text(_FILE)
    options = ["-p", "time_limit", "--begin-within", "1e-9", "-n", workers, "-ra"]
    late = _run(tmp_path, *options)
    assert late.returncode == 0, late.stdout
    assert "2 skipped" in late.stdout
    assert "minutes that this run may take to begin tests are over" in late.stdout


def test_what_begins_in_time_runs(tmp_path):
    (tmp_path / "test_two.py").write_text(_FILE)
    ran = _run(tmp_path, "-p", "time_limit", "--begin-within", "60", "-n", "0")
    assert "1 passed, 1 error" in ran.stdout


def test_a_limit_must_be_given(tmp_path):
    assert "--begin-within" in _run(tmp_path, "-p", "time_limit").stderr


def _run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
    )
