# SPDX-License-Identifier: Apache-2.0
"""Keeps OpenMP's threads, which BLAS uses on Linux, from spinning on cores that others need.

A thread that waits for work spins first. Where cores are shared, the threads that it waits for do
not run meanwhile: a step of 60 ms took over 13 s beside two busy programs on two cores.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
import threading
from functools import cache
from pathlib import Path

#: What GNU's OpenMP reads when it is loaded, once. Sleeping at once costs a quarter of the speed on
#: an idle machine; spinning for some 20 microseconds costs next to nothing, idle or beside others.
SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}
#: Those that this process was started with.
EXPORTED = frozenset(SETTINGS.keys() & os.environ.keys())
_THREAD = "vllm-metal-openmp"
_CGROUPS = Path("/sys/fs/cgroup")


def set_defaults() -> None:
    """Sets SETTINGS for processes that this one spawns, and for this one if torch is not loaded."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


@cache
def share_cores() -> None:
    """Makes OpenMP share the cores in a process that loaded it without SETTINGS.

    Call it where the model will run, before it does. torch is loaded with vLLM, before any code of
    ours. A forked process has what OpenMP read in its parent.

    OpenMP spins for a thousandth of the time while it manages more threads than there are cores
    (libgomp's manual, GOMP_SPINCOUNT). A team of two that has nothing more to do is one too many.
    """
    if sys.platform != "linux" or EXPORTED:
        return
    _bound_threads()
    ready = threading.Event()
    libraries = [ctypes.CDLL(path) for path in _libraries()]

    def hold() -> None:
        # Each of the two threads frees nothing; a team lives as long as this thread.
        free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        for library in libraries:
            library.GOMP_parallel(free, None, 2, 0)
        ready.set()
        threading.Event().wait()

    threading.Thread(target=hold, name=_THREAD, daemon=True).start()
    ready.wait()


def _libraries() -> set[str]:
    """Copies of GNU's OpenMP in this process: packages bring their own beside torch's."""
    maps = Path("/proc/self/maps").read_text()
    return set(re.findall(r"/.*/libgomp[^/\s]*\.so\S*$", maps, re.MULTILINE))


def _bound_threads() -> None:
    """Has BLAS use no more threads than the container may run at once."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ and (cores := quota()) < torch.get_num_threads():
        torch.set_num_threads(cores)


def quota(cgroups: Path = _CGROUPS) -> int:
    """Cores that this process may use: by its affinity, and by its container's share of time.

    Args:
        cgroups: where the container's limits are, of either version of Linux's control groups.
    """
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    two, one = cgroups / "cpu.max", cgroups / "cpu" / "cpu.cfs_quota_us"
    try:
        if two.exists():
            used, period = two.read_text().split()
        else:
            used, period = one.read_text(), one.with_name("cpu.cfs_period_us").read_text()
        share = math.ceil(int(used) / int(period))
    except (OSError, ValueError):  # no such files, or "max"
        return allowed
    return min(allowed, share) if share > 0 else allowed  # -1: no limit
