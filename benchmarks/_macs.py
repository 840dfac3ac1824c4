# SPDX-License-Identifier: Apache-2.0
"""Macs' chips by what is published of them: cores, bandwidth, clock and memory."""

from __future__ import annotations

from dataclasses import dataclass

#: Instructions of simdgroups that a core issues in a cycle (docs/kernels.md).
ISSUED = 4
GB = 1e9


@dataclass(frozen=True)
class Chip:
    """The largest configuration of a chip."""

    name: str
    cores: int  # of the GPU
    bandwidth: float  # GB/s of memory, as Apple states it
    clock: float  # GHz of the GPU
    memory: int  # GB at most

    @property
    def generation(self) -> str:
        return self.name.split()[0]

    @property
    def bytes_a_cycle(self) -> float:
        """What memory gives each core."""
        return self.bandwidth / self.cores / self.clock

    def slots(self, nbytes: float) -> float:
        """Issue slots of a core while memory gives it so many bytes."""
        return ISSUED * nbytes / self.bytes_a_cycle


#: Cores, bandwidth and memory are of Apple's technical specifications and press releases, those of
#: M5 Pro and Max of March 2026. Apple states no clock: these are commonly reported as the highest
#: that `powermetrics` shows; that of M5 is assumed. Parts of one generation differ by a tenth.
CHIPS = (
    Chip("M1", 8, 68.25, 1.296, 16),
    Chip("M1 Pro", 16, 200, 1.296, 32),
    Chip("M1 Max", 32, 400, 1.296, 64),
    Chip("M1 Ultra", 64, 800, 1.296, 128),
    Chip("M2", 10, 100, 1.398, 24),
    Chip("M2 Pro", 19, 200, 1.398, 32),
    Chip("M2 Max", 38, 400, 1.398, 96),
    Chip("M2 Ultra", 76, 800, 1.398, 192),
    Chip("M3", 10, 100, 1.38, 24),
    Chip("M3 Pro", 18, 150, 1.38, 36),
    Chip("M3 Max", 40, 400, 1.38, 128),
    Chip("M3 Ultra", 80, 819, 1.38, 512),
    Chip("M4", 10, 120, 1.58, 32),
    Chip("M4 Pro", 20, 273, 1.58, 64),
    Chip("M4 Max", 40, 546, 1.58, 128),
    Chip("M5", 10, 153, 1.6, 32),
    Chip("M5 Pro", 20, 307, 1.6, 64),
    Chip("M5 Max", 40, 614, 1.6, 128),
)
BY_NAME = {chip.name: chip for chip in CHIPS}
