# SPDX-License-Identifier: Apache-2.0
"""Measures MLX's peak memory independently of how far it runs ahead."""

import os
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx

from vllm_metal.engine.memory import planner

_THREADS = Path("/proc/self/task")
_ONE = mx.array(1.0)


def least_peak(run=None, prepare=None):
    """Returns a run's peak bytes with MLX waiting for each operation or prepared run.

    Its CPU backend only counts every tenth of the operations that it waits for
    (mlx/backend/cpu/encoder.h), so memory may be freed some operations late. The runs start
    at each of the ten counts, and the least peak is the exact one: one of any four
    consecutive numbers is coprime to ten, and ten steps of that many reach each count.
    Everything is repeated, because other programs shift the threads.

    MLX's cache is not used: a cached buffer may be twice as large as requested, and counts
    completely.
    """
    peaks = []
    with _on_one_cpu(), _without_cache():
        for more in (*range(4), *range(4)):
            for _ in range(10):
                peaks.append(planner.peak_of(prepare() if prepare else run))
                for _ in range(more):
                    mx.eval(-_ONE)
    return min(peaks)


@contextmanager
def _without_cache():
    before = mx.set_cache_limit(0)
    mx.clear_cache()
    try:
        yield
    finally:
        mx.set_cache_limit(before)


@contextmanager
def _on_one_cpu():
    """On Linux, keeps the submitting thread from outrunning the computing one."""
    if not _THREADS.exists():
        yield
        return
    threads = [int(path.name) for path in _THREADS.iterdir()]
    before = os.sched_getaffinity(0)
    _allow(threads, {min(before)})
    try:
        yield
    finally:
        _allow([int(path.name) for path in _THREADS.iterdir()], before)


def _allow(threads, processors):
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, processors)
