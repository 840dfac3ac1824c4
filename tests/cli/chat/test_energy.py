# SPDX-License-Identifier: Apache-2.0
"""Energy metrics, with a fake zeus-apple-silicon."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from vllm_metal.cli.chat import energy


def installed(monkeypatch, read):
    module = ModuleType("zeus_apple_silicon")
    module.AppleEnergyMonitor = lambda: SimpleNamespace(get_cumulative_energy=read)
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", module)
    monkeypatch.setattr(sys, "platform", "darwin")


def test_known_parts_are_added_up_to_joules(monkeypatch):
    parts = SimpleNamespace(cpu_total_mj=1500, gpu_mj=2500, dram_mj=None, ane_mj=0)
    installed(monkeypatch, lambda: parts)
    assert energy.meter()() == pytest.approx(4.0)


def test_a_chip_that_tells_nothing_has_no_figure(monkeypatch):
    installed(monkeypatch, SimpleNamespace)
    assert energy.meter()() is None


def test_other_systems_and_missing_packages_have_none(monkeypatch):
    assert sys.platform == "darwin" or energy.meter()() is None
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setitem(sys.modules, "zeus_apple_silicon", None)
    assert energy.meter()() is None
