# SPDX-License-Identifier: Apache-2.0
"""Checks for conditions that would distort timings: battery power, heat, other load."""

from __future__ import annotations

import ctypes
import sys

import psutil

#: By libkern/OSThermalNotification.h: 0 is nominal (or unknown); from 1 on macOS slows the chip.
_THERMAL = b"com.apple.system.thermalpressurelevel"
#: Most use of all cores since the last call. The tuner itself keeps one of at least eight busy.
_BUSY_PERCENT = 50.0


def disturbance() -> str | None:
    """Returns a condition that would distort timings now, in words; None if none is found."""
    battery = psutil.sensors_battery()
    if battery is not None and battery.power_plugged is False:
        return "this machine is on battery, and macOS saves power"
    if (level := _thermal_pressure()) > 0:
        return f"this machine is hot (thermal pressure {level}), and macOS slows it"
    if (busy := psutil.cpu_percent()) > _BUSY_PERCENT:
        return f"this machine is busy: other programs take {busy:.0f} % of its processor"
    return None


def _thermal_pressure() -> int:
    if sys.platform != "darwin":
        return 0
    library, token, level = ctypes.CDLL(None), ctypes.c_int(0), ctypes.c_uint64(0)
    if library.notify_register_check(_THERMAL, ctypes.byref(token)):
        return 0
    failed = library.notify_get_state(token, ctypes.byref(level))
    library.notify_cancel(token)
    return 0 if failed else level.value
