# SPDX-License-Identifier: Apache-2.0
"""The doctor's report on various machines."""

import dataclasses
import json
import os
import platform
import shlex
import shutil
import subprocess
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli.doctor.conftest import ended

from vllm_metal.cli.doctor import machine
from vllm_metal.cli.doctor.machine import GIB, System
from vllm_metal.device import openmp

MAC = System("darwin", "arm64", (26, 2), translated=False, mlx_wheel="py3-none-macosx_26_0_arm64")


def mac(**facts: object) -> System:
    return dataclasses.replace(MAC, **facts)


@pytest.mark.parametrize("release", [(14, 0), (14, 7, 1), (15, 6), (26, 2), (26, 2, 1), (27, 0)])
def test_a_macos_that_mlx_is_built_for_is_well(release):
    found = machine.check_release(mac(release=release))
    assert found.status == "ok"
    assert ".".join(map(str, release)) in found.seen


@pytest.mark.parametrize("release", [(26, 0), (26, 0, 1), (26, 1)])
def test_the_first_two_of_26_are_warned_with_the_way_out(release):
    found = machine.check_release(mac(release=release))
    assert found.status == "warning"
    assert "built for macOS 26.2" in found.seen
    assert "Update macOS to 26.2" in found.advice
    assert "pip install" in found.advice and "macosx_15_0_arm64" in found.advice
    # who has taken it is not warned any more
    after = mac(release=release, mlx_wheel="py3-none-macosx_15_0_arm64")
    assert machine.check_release(after).status == "ok"


def test_macos_s_release_is_its_own_command_s_word(tmp_path, monkeypatch):
    """A Python linked against an older SDK reads 16 where the release is 26."""
    command = tmp_path / "sw_vers"
    command.write_text('#!/bin/sh\n[ "$SYSTEM_VERSION_COMPAT" = 0 ] && echo 26.1 || echo 16.1\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("16.1", ("", "", ""), "arm64"))
    monkeypatch.setattr(machine.sysctl, "read", lambda name: 0)
    monkeypatch.setattr(machine.sysctl, "read_text", lambda name: "Apple M5")
    assert machine.this_system().release == (26, 1)
    command.unlink()
    assert machine.this_system().release == (16, 1)


@pytest.mark.parametrize(
    ("release", "chip", "wheel", "slow"),
    [
        ((26, 2), "Apple M5", "macosx_15_0", True),
        ((27, 0), "Apple M6 Ultra", "macosx_14_0", True),
        ((26, 2), "Apple M5 Max", "macosx_26_0", False),
        ((26, 4), "Apple M4 Max", "macosx_15_0", False),
        ((26, 1), "Apple M5", "macosx_15_0", False),  # the one for 26 does not suit
        ((26, 4), None, "macosx_15_0", False),
    ],
)
def test_an_m5_without_the_kernels_of_its_matrix_units_is_warned(release, chip, wheel, slow):
    found = machine.check_release(mac(release=release, chip=chip, mlx_wheel=f"py3-none-{wheel}_a"))
    assert found.status == ("warning" if slow else "ok")
    if slow:
        assert chip in found.seen and "2 to 3 times slower" in found.seen
        (line,) = (line for line in found.advice.splitlines() if " pip install " in line)
        assert shlex.split(line)[0] == "SYSTEM_VERSION_COMPAT=0" and "--force-reinstall" in line


def test_a_command_to_be_copied_survives_a_space(monkeypatch):
    monkeypatch.setattr(machine.sys, "executable", "/Users/jo/My Projects/.venv/bin/python")
    advice = machine.check_release(mac(release=(26, 1))).advice
    (line,) = (line for line in advice.splitlines() if " pip install " in line)
    assert shlex.split(line)[0] == "/Users/jo/My Projects/.venv/bin/python"


def test_an_older_macos_fails():
    found = machine.check_release(mac(release=(13, 6)))
    assert found.status == "failed" and "needs 14" in found.seen


@pytest.mark.parametrize(
    ("release", "status"),
    [((15, 7), "warning"), ((26, 6), "warning"), ((26, 6, 1), "ok"), ((27, 0), "ok")],
)
def test_a_macos_whose_driver_panics_is_named(release, status):
    found = machine.check_driver(mac(release=release))
    assert found.status == status
    if status == "warning":
        assert "completeMemory" in found.seen and "26.6.1 or newer" in found.advice


def test_there_is_no_driver_to_check_elsewhere():
    assert machine.check_driver(mac(name="linux", release=())) is None


def test_rosetta_is_named():
    assert machine.check_processor(MAC).status == "ok"
    found = machine.check_processor(mac(machine="x86_64", translated=True))
    assert found.status == "failed" and "Rosetta" in found.seen and "uv venv" in found.advice
    found = machine.check_processor(mac(machine="x86_64"))
    assert found.status == "failed" and "Intel" in found.seen


def test_what_a_user_of_openmp_may_export_is_named(monkeypatch):
    linux = mac(name="linux", machine="x86_64")
    monkeypatch.setattr(openmp, "EXPORTED", frozenset())
    seen = machine.check_processor(linux).seen
    assert "OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=20000" in seen
    monkeypatch.setattr(openmp, "EXPORTED", frozenset({"OMP_WAIT_POLICY"}))
    assert "export" not in machine.check_processor(linux).seen


def reported(available: float) -> dict[str, object]:
    memory = {"total": 12 * GIB, "available": available * GIB, "active": 0}
    return {"ram_bytes": 16 * GIB, "memory_bytes": memory}


def test_too_little_memory_is_warned_of():
    assert machine.check_memory(reported(4), GIB).status == "ok"
    found = machine.check_memory(reported(1), GIB)
    assert found.status == "warning"
    assert "16.0 GiB" in found.seen and "1.0 are free" in found.seen
    assert "close other programs" in found.advice


def test_a_device_that_was_asked_for_must_be_there():
    facts = {"metal": False, "device": "cpu", "chip": "M9", "architecture": "g42"}
    assert machine.check_device(ended(**facts), "cpu").status == "ok"
    found = machine.check_device(ended(**facts), "metal")
    assert found.status == "failed" and "Metal device" in found.seen
    lines = ("ImportError: Failed to load the default metallib",)
    found = machine.check_device(ended(1, lines, stage="importing MLX"), "metal")
    assert found.status == "failed"
    assert "while importing MLX: ImportError: Failed to load" in found.seen
    assert found.log == lines


def test_the_cache_folder_need_not_be_there_but_must_be_writable(tmp_path: Path, monkeypatch):
    assert machine.check_disk(tmp_path / "not" / "yet").status == "ok"
    (tmp_path / "file").write_text("")
    found = machine.check_disk(tmp_path / "file" / "below")
    assert found.status == "failed" and "VLLM_METAL_CACHE" in found.advice
    full = SimpleNamespace(total=10**12, used=10**12 - 10**6, free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert machine.check_disk(tmp_path).status == "warning"


def test_settings_are_read_as_the_plugin_reads_them(monkeypatch):
    monkeypatch.setenv("VLLM_METAL_DEVICE", "cpu")
    assert "VLLM_METAL_DEVICE=cpu" in machine.check_settings().seen
    monkeypatch.setenv("VLLM_METAL_KERNEL", "mlx")  # a letter is missing
    found = machine.check_settings()
    assert found.status == "warning" and "VLLM_METAL_KERNEL:" in found.advice
    monkeypatch.setenv("VLLM_METAL_DEVICE", "gpu")
    found = machine.check_settings()
    assert found.status == "failed" and "VLLM_METAL_DEVICE='gpu'" in found.seen


def test_settings_name_no_folders_and_no_secrets(monkeypatch):
    monkeypatch.setenv("VLLM_METAL_CACHE", "/Users/jane/cache")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    found = dict(machine.settings())
    assert found["VLLM_METAL_CACHE"] == "set"
    assert "VLLM_API_KEY" not in found


def test_mlxs_wheel_is_told_where_all_is_well():
    (tag, *_) = [
        line.removeprefix("Tag: ")
        for line in distribution("mlx").read_text("WHEEL").splitlines()
        if line.startswith("Tag: ")
    ]
    assert machine.facts()["wheels"]["mlx"] == tag


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
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(machine.sysctl, "read", numbers.get)
    displays = [{"sppci_model": "Apple M4 Pro", "sppci_cores": "20", "_name": "Apple M4 Pro"}]
    commands(
        tmp_path,
        monkeypatch,
        sw_vers="ProductName: macOS\nProductVersion: 26.2\n",
        system_profiler=json.dumps({"SPDisplaysDataType": displays}) + "\n",
    )
    reported = machine.facts()
    assert (reported["chip"], reported["gpu_cores"]) == ("Apple M4 Pro", "20")
    assert (reported["memory_bytes"], reported["wired_limit_mb"]) == (2**34, 0)
    assert reported["sw_vers"] == ["ProductName: macOS", "ProductVersion: 26.2"]
    (tmp_path / "sw_vers").unlink()
    commands(tmp_path, monkeypatch, system_profiler="no JSON\n")
    reported = machine.facts()
    assert reported["sw_vers"] == [] and reported["gpu_cores"] is None


def test_crash_reports_are_named_the_newest_first_and_others_are_not(tmp_path: Path):
    names = ["python3.12-2026-1.ips", "JetsamEvent-2026-2.ips", "panic-full-2026-3.panic"]
    for age, name in enumerate([*names, "Diary-2026-4.ips", "python3.12.txt"]):
        (tmp_path / name).write_text("what it says is not read")
        os.utime(tmp_path / name, (age, age))
    assert machine.crash_reports([tmp_path / "absent", tmp_path]) == names[::-1]


def test_a_command_that_hangs_tells_nothing(monkeypatch):
    def hangs(*arguments: object, **options: object):
        raise subprocess.TimeoutExpired("sw_vers", 20)

    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(machine.sysctl, "read", lambda name: None)
    monkeypatch.setattr(subprocess, "run", hangs)
    assert machine.facts()["chip"] is None
