# SPDX-License-Identifier: Apache-2.0
"""Splits a device's memory equally between the workers of one server."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_metal.device.mlx_device import MemoryFigures


@dataclass(frozen=True)
class Share:
    """One of `workers` equal parts of a device's memory."""

    workers: int  # whole engines, or ranks of one model
    # Bytes held by other programs before the first worker started: system-wide figures cannot tell
    # a worker what its siblings have allocated since.
    in_use: int

    @staticmethod
    def of(workers: int, figures: MemoryFigures) -> Share:
        """A share of a device's current memory, taken before any worker starts."""
        return Share(workers, max(figures.total - figures.available, 0))

    def part(self, figures: MemoryFigures) -> MemoryFigures:
        """A worker's view of the device; `active` is what it holds itself."""
        total = figures.total // self.workers
        available = max(total - self.in_use // self.workers, 0)
        return MemoryFigures(total=total, available=available, active=figures.active)

    @property
    def words(self) -> str:
        """Suffix to the name of a device's memory in a budget."""
        return f", 1 of {self.workers} parts"
