# SPDX-License-Identifier: Apache-2.0
"""What is told of a machine beside the checks."""

import json
import os
import subprocess
from importlib.metadata import distribution
from pathlib import Path

from vllm_metal.commands.doctor import facts


def test_mlxs_wheel_is_told_where_all_is_well():
    (tag, *_) = [
        line.removeprefix("Tag: ")
        for line in distribution("mlx").read_text("WHEEL").splitlines()
        if line.startswith("Tag: ")
    ]
    assert facts.of_machine()["wheels"]["mlx"] == tag


def commands(folder: Path, monkeypatch, **texts: str) -> None:
    """Puts commands that print a text on an otherwise empty PATH."""
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
        (folder / name).write_text(
            f'#!/bin/sh\nwhile read -r line; do echo "$line"; done < {folder}/{name}.txt\n'
        )
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_macs_release_chip_gpu_and_memory_are_told(tmp_path: Path, monkeypatch):
    numbers = {"hw.memsize": 2**34, "iogpu.wired_limit_mb": 0}
    monkeypatch.setattr(facts.sys, "platform", "darwin")
    monkeypatch.setattr(facts.sysctl, "read", numbers.get)
    displays = [{"sppci_model": "Apple M4 Pro", "sppci_cores": "20", "_name": "Apple M4 Pro"}]
    commands(
        tmp_path,
        monkeypatch,
        sw_vers="ProductName: macOS\nProductVersion: 26.2\n",
        system_profiler=json.dumps({"SPDisplaysDataType": displays}) + "\n",
    )
    told = facts.of_machine()
    assert (told["chip"], told["gpu_cores"]) == ("Apple M4 Pro", "20")
    assert (told["memory_bytes"], told["wired_limit_mb"]) == (2**34, 0)
    assert told["sw_vers"] == ["ProductName: macOS", "ProductVersion: 26.2"]
    (tmp_path / "sw_vers").unlink()
    commands(tmp_path, monkeypatch, system_profiler="no JSON\n")
    told = facts.of_machine()
    assert told["sw_vers"] == [] and told["gpu_cores"] is None


def test_crash_reports_are_named_the_newest_first_and_others_are_not(tmp_path: Path):
    names = ["python3.12-2026-1.ips", "JetsamEvent-2026-2.ips", "panic-full-2026-3.panic"]
    for age, name in enumerate([*names, "Diary-2026-4.ips", "python3.12.txt"]):
        (tmp_path / name).write_text("what it says is not read")
        os.utime(tmp_path / name, (age, age))
    assert facts.crash_reports([tmp_path / "absent", tmp_path]) == names[::-1]


def test_a_command_that_hangs_tells_nothing(monkeypatch):
    def hangs(*arguments: object, **options: object):
        raise subprocess.TimeoutExpired("sw_vers", 20)

    monkeypatch.setattr(facts.sys, "platform", "darwin")
    monkeypatch.setattr(facts.sysctl, "read", lambda name: None)
    monkeypatch.setattr(subprocess, "run", hangs)
    assert facts.of_machine()["chip"] is None
