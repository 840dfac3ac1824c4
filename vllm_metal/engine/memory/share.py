# SPDX-License-Identifier: Apache-2.0
"""Splits a device's memory equally between the workers of one server."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_metal.device.mlx_device import MemoryUsage


@dataclass(frozen=True)
class Share:
    """One of `workers` equal parts of a device's memory."""

    workers: int  # whole engines, or ranks of one model
    # Bytes held by other programs before the first worker started: system-wide figures cannot tell
    # a worker what its siblings have allocated since.
    in_use: int

    @staticmethod
    def of(workers: int, usage: MemoryUsage) -> Share:
        """Divides a device's memory as it is now; call it before any worker starts."""
        return Share(workers, max(usage.total - usage.available, 0))

    def part(self, usage: MemoryUsage) -> MemoryUsage:
        """Returns one worker's part of `usage`; `active`, its own allocations, is unchanged."""
        total = usage.total // self.workers
        available = max(total - self.in_use // self.workers, 0)
        return MemoryUsage(total=total, available=available, active=usage.active)

    @property
    def words(self) -> str:
        """Text that follows the device's name in a budget's line, such as ", 1 of 2 parts"."""
        return f", 1 of {self.workers} parts"
