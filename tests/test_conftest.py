# SPDX-License-Identifier: Apache-2.0
"""Runs are reproducible, use their own folder, shuffle by a seed, skip whole files."""

import importlib.util
import itertools
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from metal_kernels.cache import cache_dir

TESTS = Path(__file__).parent


def drawn():
    """The examples of a property test."""
    seen = []

    @given(st.integers(), st.text())
    def collect(number, text):
        seen.append((number, text))

    collect()
    return seen


def test_examples_are_the_same_whatever_modules_are_loaded(tmp_path, monkeypatch):
    before = drawn()
    path = tmp_path / "loaded_meanwhile.py"
    path.write_text("\n".join(f"NUMBER_{n}, TEXT_{n} = {10**6 + n}, 'text {n}'" for n in range(99)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, path.stem, module)
    assert drawn() == before


def unseeded():
    return [random.random(), np.random.random(), mx.random.uniform().item(), torch.rand(()).item()]


@pytest.fixture
def drawn_before():
    return unseeded()


def test_unseeded_draws_are_the_same_in_every_run(drawn_before):
    assert unseeded() == drawn_before
    random.seed(0)
    np.random.seed(0)
    mx.random.seed(0)
    torch.manual_seed(0)
    assert unseeded() == drawn_before


def test_results_are_kept_in_the_folder_of_the_run():
    assert not cache_dir().is_relative_to(Path.home() / ".cache")
    assert cache_dir().is_relative_to(os.environ["XDG_CACHE_HOME"])


def test_files_of_another_command_are_not_imported_and_a_seed_shuffles(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    shutil.copy(TESTS / "conftest.py", folder)
    (folder / "test_whole.py").write_text(
        "import pytest\npytestmark = pytest.mark.more\nraise RuntimeError('it was imported')\n"
    )
    for name in "abcd":
        several = [f"def test_{number}(): ..." for number in range(5)]
        (folder / f"test_{name}.py").write_text("\n".join(several))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    more: more\n    slow: slow\n")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-q"]
    command += ["--collect-only", "-m", "not more and not slow", "--shuffle", "7", "tests"]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(found) == 20 and found != sorted(found)
    files = [line.partition("::")[0] for line in found]
    assert len({*itertools.pairwise(files)}) == 4 + 3, "files stay together"
