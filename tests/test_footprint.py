# SPDX-License-Identifier: Apache-2.0
"""The plugin prints the memory of this process and its children."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

from footprint import Footprint

MIB = 2**20
CHILD = "held = bytearray(b'1') * (250 << 20); print('there', flush=True); input()"


def show() -> None:
    """Prints a footprint's lines in an otherwise empty process."""
    footprint = Footprint()
    footprint.pytest_runtest_logstart("tests/test_small.py::test_it")
    footprint.sample()
    footprint.pytest_runtest_logfinish("tests/test_small.py::test_it")
    footprint.pytest_runtest_logstart("tests/test_large.py::test_it[gpt2::small]")
    held = bytearray(b"1") * (150 * MIB)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"there\n"
        footprint.sample()
        child.communicate(b"\n")
    del held
    footprint.sample()
    footprint.pytest_runtest_logfinish("tests/test_large.py::test_it[gpt2::small]")
    reporter = mock.Mock()
    footprint.pytest_terminal_summary(reporter)
    print(reporter.section.call_args.args[0])
    for call in reporter.write_line.call_args_list:
        print(call.args[0])


def test_the_peak_of_a_file_includes_the_children_of_its_tests():
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", "import test_footprint; test_footprint.show()"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    title, *lines = shown.stdout.splitlines()
    found = [re.fullmatch(r" *(\d+) MiB +\d+ s  (.*)", line).groups() for line in lines]
    assert [file for _, file in found] == ["tests/test_large.py", "tests/test_small.py"]
    large, small = (int(peak) for peak, _ in found)
    assert 390 < large - small < 450  # a Python without anything has some 10
    highest = float(re.fullmatch(r"memory: ([\d.]+) GiB at most", title)[1])
    assert abs(highest * 1024 - large) < 6  # of the two digits
