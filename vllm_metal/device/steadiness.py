# SPDX-License-Identifier: Apache-2.0
"""Asks this machine what would spoil a timing now: power, heat, other work."""

from __future__ import annotations

import ctypes
import sys

import psutil

#: By libkern/OSThermalNotification.h: 0 is nominal; from 1 on macOS slows the chip.
_THERMAL = b"com.apple.system.thermalpressurelevel"
#: Of all cores, since the last question. The tuner itself keeps one busy, of eight at least.
_BUSY_PERCENT = 50.0


def disturbance() -> str | None:
    """What would spoil a timing, in words; None: nothing that the machine tells."""
    battery = psutil.sensors_battery()
    if battery is not None and battery.power_plugged is False:
        return "this machine is on battery, and macOS saves power"
    if (level := _thermal_pressure()) > 0:
        return f"this machine is hot (thermal pressure {level}), and macOS slows it"
    if (busy := psutil.cpu_percent()) > _BUSY_PERCENT:
        return f"this machine is busy: other programs take {busy:.0f} % of its processor"
    return None


def _thermal_pressure() -> int:
    """The level that macOS publishes (notify.h); 0: nominal, or not told."""
    if sys.platform != "darwin":
        return 0
    library, token, level = ctypes.CDLL(None), ctypes.c_int(0), ctypes.c_uint64(0)
    if library.notify_register_check(_THERMAL, ctypes.byref(token)):
        return 0
    failed = library.notify_get_state(token, ctypes.byref(level))
    library.notify_cancel(token)
    return 0 if failed else level.value
