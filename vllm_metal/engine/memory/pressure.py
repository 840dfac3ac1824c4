# SPDX-License-Identifier: Apache-2.0
"""Returns MLX's spare buffers to macOS when it runs short of memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import mlx.core as mx
from vllm.logger import init_logger

from vllm_metal.device import sysctl

logger = init_logger(__name__)

#: Values of kern.memorystatus_vm_pressure_level.
NORMAL, WARNING, CRITICAL = 1, 2, 4
NAMES = {WARNING: "low", CRITICAL: "critically low"}
#: Seconds between two reads of the level, each a system call, and between two log lines about it.
#: At WARNING, the usual level of an 8 GB Mac, buffers are also returned no more often than that:
#: otherwise each step would have to allocate its buffers anew.
POLL_EVERY = 1.0
LOG_EVERY = 60.0


class MemoryPressure:
    """Polls macOS's memory pressure from an engine's steps; an idle engine takes no more memory."""

    def __init__(
        self,
        read_level: Callable[[], int] | None = None,  # None: the kernel's level, on macOS
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read_level = read_level or (read_kernel_level if sys.platform == "darwin" else None)
        self._clock = clock
        self._next_poll = self._next_log = -float("inf")

    def poll(self) -> None:
        """Called every step; reads the level at most every POLL_EVERY seconds."""
        if self._read_level is None or (now := self._clock()) < self._next_poll:
            return
        self._next_poll = now + POLL_EVERY
        level = self._read_level()
        if level <= NORMAL or (level < CRITICAL and now < self._next_log):
            return
        spare = mx.get_cache_memory()
        mx.clear_cache()
        if now >= self._next_log:
            self._next_log = now + LOG_EVERY
            logger.warning(
                "macOS reports that memory is %s: freed %.0f MiB of spare buffers. Close other "
                "programs, or start with a lower --gpu-memory-utilization",
                NAMES.get(level, f"at level {level}"),
                spare / 2**20,
            )


def read_kernel_level() -> int:
    """Reads macOS's level of memory pressure; NORMAL if it cannot be read."""
    return sysctl.read("kern.memorystatus_vm_pressure_level") or NORMAL
