# SPDX-License-Identifier: Apache-2.0
"""Warnings about MLX's wheel at start, also if Python reports macOS 26 as 16."""

import platform
from types import SimpleNamespace

import pytest

from vllm_metal.device import macos, sysctl


@pytest.fixture
def m5(tmp_path, monkeypatch):
    command = tmp_path / "sw_vers"
    command.write_text('#!/bin/sh\n[ "$SYSTEM_VERSION_COMPAT" = 0 ] && echo 26.4 || echo 16.0\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("16.0", ("", "", ""), "arm64"))
    monkeypatch.setattr(sysctl, "read_text", {"machdep.cpu.brand_string": "Apple M5 Pro"}.get)


def install(monkeypatch, tag):
    wheel = SimpleNamespace(read_text=lambda name: f"Wheel-Version: 1.0\nTag: {tag}\n")
    monkeypatch.setattr(macos, "distribution", lambda name: wheel)


def test_a_start_names_a_wheel_without_the_matrix_units(m5, monkeypatch):
    install(monkeypatch, "py3-none-macosx_15_0_arm64")
    said = macos.slow_prompts_here()
    assert said is not None
    assert "MLX's wheel for macOS 15" in said and "2 to 3 times slower" in said


def test_a_start_says_nothing_of_the_wheel_for_26(m5, monkeypatch):
    install(monkeypatch, "py3-none-macosx_26_0_arm64")
    assert macos.slow_prompts_here() is None


def test_a_start_says_nothing_elsewhere(monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    assert macos.slow_prompts_here() is None
    assert macos.release() == ()
