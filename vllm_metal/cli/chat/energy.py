# SPDX-License-Identifier: Apache-2.0
"""Reads the energy consumption of a Mac's chip with zeus-apple-silicon, if installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

#: Fields of AppleEnergyMetrics that add up to the chip and its memory, by the README of
#: zeus-apple-silicon 1.1.0 (not tried on a Mac yet): millijoules since a fixed moment, None if the
#: chip does not report it.
_PARTS = ("cpu_total_mj", "gpu_mj", "gpu_sram_mj", "dram_mj", "ane_mj")
_MODULE = "zeus_apple_silicon"


def meter() -> Callable[[], float | None]:
    """Returns a function that reads the joules since a fixed moment, or None if unavailable."""
    if sys.platform != "darwin":
        return _unknown
    try:
        monitor = import_module(_MODULE).AppleEnergyMonitor()
    except (ImportError, AttributeError, RuntimeError):  # missing, or unsupported macOS
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
