# SPDX-License-Identifier: Apache-2.0
"""A device's memory where several workers of one server have it: each has an equal part."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_metal.device.mlx_device import MemoryFigures


@dataclass(frozen=True)
class Share:
    """One of `workers` equal parts of a device's memory.

    How much other programs hold is what was there before the first of them started: a worker
    cannot tell from the system's figures what those beside it have taken meanwhile.
    """

    workers: int  # whole engines, or ranks that have a part of one model each
    in_use: int  # bytes of the device that other programs hold

    @staticmethod
    def of(workers: int, figures: MemoryFigures) -> Share:
        """A share of what a device has now, before any of the workers is there."""
        return Share(workers, max(figures.total - figures.available, 0))

    def part(self, figures: MemoryFigures) -> MemoryFigures:
        """What one of the workers may see of a device; what it holds itself stays its own."""
        total = figures.total // self.workers
        available = max(total - self.in_use // self.workers, 0)
        return MemoryFigures(total=total, available=available, active=figures.active)

    @property
    def words(self) -> str:
        """What follows the name of a device's memory in a sum."""
        return f", 1 of {self.workers} parts"
