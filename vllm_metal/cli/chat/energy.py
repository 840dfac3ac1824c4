# SPDX-License-Identifier: Apache-2.0
"""Reads how much energy a Mac's chip has taken, with zeus-apple-silicon where it is installed.

No Mac has run this yet. The package's README (1.1.0) has the names: millijoules since some moment
that stays the same, None where a chip does not tell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

#: Fields of its AppleEnergyMetrics that add up to the chip and its memory.
_PARTS = ("cpu_total_mj", "gpu_mj", "gpu_sram_mj", "dram_mj", "ane_mj")
_MODULE = "zeus_apple_silicon"


def meter() -> Callable[[], float | None]:
    """A function that returns joules since some moment; None wherever they cannot be read."""
    if sys.platform != "darwin":
        return _unknown
    try:
        monitor = import_module(_MODULE).AppleEnergyMonitor()
    except (ImportError, AttributeError, RuntimeError):  # absent, or of another macOS
        return _unknown

    def joules() -> float | None:
        try:
            metrics = monitor.get_cumulative_energy()
        except RuntimeError:
            return None
        parts = [getattr(metrics, name, None) for name in _PARTS]
        known = [part for part in parts if part is not None]
        return sum(known) / 1000 if known else None

    return joules


def _unknown() -> None:
    return None
