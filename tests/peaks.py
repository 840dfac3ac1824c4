# SPDX-License-Identifier: Apache-2.0
"""Peaks of MLX's memory that do not depend on how far it runs ahead."""

import os
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx

from vllm_metal.engine.memory import planner

_THREADS = Path("/proc/self/task")
_ONE = mx.array(1.0)


def least_peak(run=None, prepare=None):
    """Bytes that a run takes where MLX waits for each operation, or each run that `prepare` gives.

    Its CPU backend counts only every tenth of the operations that it waits for
    (mlx/backend/cpu/encoder.h), so that memory may come back some operations late. The runs begin
    at each count of the ten, and the least of them is the one that was waited for: of any four
    numbers in a row one has no factor in common with ten, and ten steps of that many come by each.
    All of it twice: where other programs run, the threads change places at other operations.

    Nothing is taken from MLX's cache: a buffer from there may be twice as large as what is asked
    for, and counts whole.
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
    """On Linux: the thread that hands operations over does not outrun the one that computes."""
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
