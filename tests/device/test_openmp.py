# SPDX-License-Identifier: Apache-2.0
"""OpenMP leaves cores to others in a process that loaded it before our code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vllm_metal.device import openmp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has Accelerate")

CODE = """
import ctypes, os, sys, threading
import torch
for copy in sys.argv[1:]:
    ctypes.CDLL(copy)
from vllm_metal.device import openmp

torch.ones(1000, 1000) @ torch.ones(1000, 1000)
def counts():
    all = len(os.listdir("/proc/self/task"))
    return threading.active_count(), all - threading.active_count()

before = counts()
openmp.share_cores()
openmp.share_cores()
added = [now - then for now, then in zip(counts(), before)]
print(*added, (torch.ones(300, 300) @ torch.ones(300, 300))[0, 0].item())
"""


@pytest.mark.parametrize(
    ("exported", "added"),
    [
        ({}, 1),
        pytest.param({"GOMP_SPINCOUNT": "20000"}, 0, marks=pytest.mark.more),
        pytest.param({"OMP_WAIT_POLICY": "ACTIVE"}, 0, marks=pytest.mark.more),
    ],
)
def test_a_process_that_was_started_without_the_settings(exported, added, tmp_path):
    packages = Path(torch.__file__).parents[1]
    library = next(
        x for name in ("torch/lib", "torch.libs") for x in (packages / name).glob("libgomp*")
    )
    copy = tmp_path / "a folder with spaces" / library.name
    copy.parent.mkdir()
    shutil.copy(library, copy)
    kept = {name: value for name, value in os.environ.items() if name not in openmp.SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(copy)],
        env=kept | exported,
        capture_output=True,
        text=True,
    )
    held, of_openmp, product = done.stdout.split()  # threads of Python's, and of teams that wait
    # One idle thread for torch's library, one for its copy.
    assert (int(held), int(of_openmp), product) == (added, 2 * added, "300.0"), done.stderr


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_share_of_a_container(tmp_path, files, cores, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4})
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert openmp.quota(tmp_path) == (cores or 5)
