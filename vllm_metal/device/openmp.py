# SPDX-License-Identifier: Apache-2.0
"""Keeps OpenMP's threads, which BLAS uses on Linux, from spinning on cores that others need."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
import threading
from functools import cache
from pathlib import Path

#: Variables that GNU's OpenMP reads once, when it is loaded. By default a thread that waits for
#: work spins first. On shared cores, the threads it waits for do not run meanwhile: a 60 ms step
#: took over 13 s beside two busy programs on two cores. Sleeping immediately costs a quarter of the
#: speed on an idle machine; spinning for some 20 µs costs almost nothing, on idle and on busy
#: machines.
SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "20000"}
#: Names in SETTINGS that the user has set.
EXPORTED = frozenset(SETTINGS.keys() & os.environ.keys())
_THREAD = "vllm-metal-openmp"
_CGROUPS = Path("/sys/fs/cgroup")


def set_defaults() -> None:
    """Sets SETTINGS for child processes, and for this one if torch is not loaded yet."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


@cache
def share_cores() -> None:
    """Makes OpenMP share the cores in a process that loaded it without SETTINGS.

    Call it in the process that runs the model, before the model runs.
    """
    # vLLM loads torch, and torch loads OpenMP, before any of our code runs; a forked process keeps
    # the settings that its parent read.
    if sys.platform != "linux" or EXPORTED:
        return
    _limit_threads()
    ready = threading.Event()
    libraries = [ctypes.CDLL(path) for path in _libraries()]

    # OpenMP spins a thousand times shorter while it manages more threads than there are cores
    # (libgomp's manual, GOMP_SPINCOUNT). An extra team of two idle threads is enough for that.
    def hold() -> None:
        # Both threads call free(NULL), a no-op; the team lives as long as this thread.
        free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
        for library in libraries:
            library.GOMP_parallel(free, None, 2, 0)
        ready.set()
        threading.Event().wait()

    threading.Thread(target=hold, name=_THREAD, daemon=True).start()
    ready.wait()


def _libraries() -> set[str]:
    # Packages bring copies of their own in addition to torch's.
    maps = Path("/proc/self/maps").read_text()
    return set(re.findall(r"/.*/libgomp[^/\s]*\.so\S*$", maps, re.MULTILINE))


def _limit_threads() -> None:
    import torch

    # No more BLAS threads than the container may run at once.
    if "OMP_NUM_THREADS" not in os.environ and (cores := quota()) < torch.get_num_threads():
        torch.set_num_threads(cores)


def quota(cgroups: Path = _CGROUPS) -> int:
    """Returns the cores this process may use: its CPU affinity, capped by the container's quota.

    `cgroups` is the mount point of Linux control groups, version 1 or 2.
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
