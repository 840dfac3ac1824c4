# SPDX-License-Identifier: Apache-2.0
"""Environment variables, and when the plugin applies."""

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
from mac import tell_numbers

import vllm_metal
from metal_kernels.cache import cache_dir
from vllm_metal.settings import envs


@pytest.mark.parametrize(
    ("system", "machine", "setting", "vllm", "device"),
    [
        ("darwin", "arm64", None, "0.33.0+metal", "metal"),
        ("darwin", "x86_64", None, "0.33.0", None),
        ("linux", "x86_64", None, "0.33.0", None),
        ("linux", "x86_64", None, "0.33.0+metal", "cpu"),  # nothing else could serve
        ("linux", "x86_64", None, None, None),
        ("linux", "x86_64", "off", "0.33.0+metal", None),
        ("linux", "aarch64", "cpu", "0.33.0", "cpu"),
        ("darwin", "arm64", "cpu", "0.33.0+metal", "cpu"),
        ("darwin", "arm64", "off", "0.33.0+metal", None),
        ("linux", "x86_64", "METAL", "0.33.0", "metal"),
    ],
)
def test_the_plugin_applies_on_apple_silicon_or_when_asked(
    monkeypatch, system, machine, setting, vllm, device
):
    def version(name):
        if vllm is None:
            raise PackageNotFoundError(name)
        return vllm

    monkeypatch.setattr(envs, "version", version)
    monkeypatch.setattr(sys, "platform", system)
    tell_numbers(monkeypatch, {"machdep.cpu.brand_string": b"Apple M9\0"})
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.delenv("VLLM_METAL_DEVICE", raising=False)
    if setting is not None:
        monkeypatch.setenv("VLLM_METAL_DEVICE", setting)
    assert envs.requested_device() == device
    assert vllm_metal.register() == (vllm_metal.PLATFORM if device else None)


def test_a_bad_device_is_named(monkeypatch):
    monkeypatch.setenv("VLLM_METAL_DEVICE", "gpu")
    with pytest.raises(ValueError, match="VLLM_METAL_DEVICE='gpu': choose metal, cpu or off"):
        envs.requested_device()
    assert vllm_metal.register() == vllm_metal.PLATFORM  # whose own import tells the user


@pytest.mark.parametrize(
    ("setting", "allowed"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_an_untested_vllm_is_allowed_by_a_one(monkeypatch, setting, allowed):
    monkeypatch.delenv("VLLM_METAL_ALLOW_UNTESTED", raising=False)
    if setting is not None:
        monkeypatch.setenv("VLLM_METAL_ALLOW_UNTESTED", setting)
    assert envs.allow_untested() is allowed
    monkeypatch.setenv("VLLM_METAL_ALLOW_UNTESTED", "yes")
    with pytest.raises(ValueError, match="VLLM_METAL_ALLOW_UNTESTED='yes': choose 0 or 1"):
        envs.allow_untested()


def test_the_cache_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VLLM_METAL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_dir() == tmp_path / ".cache" / "vllm-metal"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "vllm-metal"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == tmp_path / ".cache" / "vllm-metal"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == tmp_path / "Library" / "Caches" / "vllm-metal"
    monkeypatch.setenv("VLLM_METAL_CACHE", str(tmp_path / "mine"))
    assert cache_dir() == tmp_path / "mine"


def test_importing_the_entry_point_imports_neither_torch_nor_mlx():
    code = "import sys, vllm_metal; vllm_metal.register(); print({'torch', 'mlx'} & {*sys.modules})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("system", "there", "given", "chosen"),
    [
        ("linux", [], None, "cpu"),
        ("linux", ["dev/nvidia0"], None, None),
        ("linux", ["dev/nvidiactl"], None, "cpu"),
        ("linux", ["dev/dri/renderD128"], None, None),
        ("linux", ["dev/vfio/3"], None, None),
        ("linux", [], "off", "off"),
        ("darwin", [], None, None),
    ],
)
def test_commands_choose_the_cpu_where_linux_has_nothing_else(
    monkeypatch, tmp_path, system, there, given, chosen
):
    for path in there:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(envs, "Path", lambda root: tmp_path)
    monkeypatch.setenv("VLLM_METAL_DEVICE", given or "")
    if given is None:
        monkeypatch.delenv("VLLM_METAL_DEVICE")
    envs.choose_device()
    assert os.environ.get("VLLM_METAL_DEVICE") == chosen
