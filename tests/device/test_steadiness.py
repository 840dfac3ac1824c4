# SPDX-License-Identifier: Apache-2.0
"""A machine on battery, hot or busy is not timed."""

import ctypes
import sys
from types import SimpleNamespace

import pytest

from vllm_metal.device import steadiness


@pytest.fixture(autouse=True)
def calm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    machine(monkeypatch)


def machine(monkeypatch, plugged: bool | None = None, busy: float = 5.0) -> None:
    battery = None if plugged is None else SimpleNamespace(power_plugged=plugged)
    monkeypatch.setattr("psutil.sensors_battery", lambda: battery, raising=False)
    monkeypatch.setattr("psutil.cpu_percent", lambda: busy)


def thermal_pressure(monkeypatch, level: int | None) -> None:
    """Fakes macOS's notify.h; None: the name is unknown."""

    def notify_register_check(name, token):
        assert name == b"com.apple.system.thermalpressurelevel"
        ctypes.cast(token, ctypes.POINTER(ctypes.c_int)).contents.value = 7
        return 0 if level is not None else 1

    def notify_get_state(token, state):
        assert token.value == 7
        ctypes.cast(state, ctypes.POINTER(ctypes.c_uint64)).contents.value = level
        return 0

    library = SimpleNamespace(
        notify_register_check=notify_register_check,
        notify_get_state=notify_get_state,
        notify_cancel=lambda token: 0,
    )
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.mark.parametrize("plugged", [None, True])
@pytest.mark.parametrize("level", [0, None])
def test_a_cool_machine_on_mains_is_steady(monkeypatch, plugged, level):
    assert steadiness.disturbance() is None
    machine(monkeypatch, plugged=plugged)
    thermal_pressure(monkeypatch, level)
    assert steadiness.disturbance() is None


def test_each_disturbance_is_named(monkeypatch):
    machine(monkeypatch, plugged=False)
    assert "on battery" in (steadiness.disturbance() or "")
    machine(monkeypatch, busy=80.0)
    assert "busy: other programs take 80 %" in (steadiness.disturbance() or "")
    machine(monkeypatch)
    thermal_pressure(monkeypatch, 2)
    assert "hot (thermal pressure 2)" in (steadiness.disturbance() or "")
