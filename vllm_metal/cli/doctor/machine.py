# SPDX-License-Identifier: Apache-2.0
"""Checks the machine: processor, macOS, MLX, memory, disk and settings.

Also collects facts that no check depends on, for the readers of a report.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from vllm_metal.cli.doctor import packages
from vllm_metal.cli.doctor.report import Finding
from vllm_metal.device import identity, macos, openmp, sysctl
from vllm_metal.device.child import ChildResult, Progress, python, run
from vllm_metal.settings import envs

GIB = 2**30
#: 1 if Rosetta runs the process: Apple, "About the Rosetta translation environment".
TRANSLATED = "sysctl.proc_translated"
#: Oldest macOS with MLX wheels (macosx_14_0_arm64).
OLDEST_MACOS = (14, 0)
#: First macOS without reports of the GPU driver's panic "completeMemory() prepare count underflow".
#: There are reports for 15 and for 26.3 to 26.5, the smallest with 4.5 GB in use (mlx#3346,
#: mlx#3186, mlx-lm#883, omlx#300).
STEADY_DRIVER = (26, 6, 1)
#: Memory needed in addition to the weights: a server's two processes, each with torch, vLLM and
#: MLX, take 0.9 GiB (measured on Linux with almost no weights), and the smallest pool tried takes
#: 0.25.
PROCESSES_BYTES = int(1.25 * GIB)
#: Space needed in the cache folder: the embedded model as float32 is 0.54 GB, and twice that while
#: it is written.
CACHE_BYTES = 1.5 * GIB
_KNOWN = (*envs.NAMES, "VLLM_METAL_CLANG")
_GROUPS = ("VLLM_METAL_", "MLX_", "MTL_", "METAL_", "PYTORCH_MPS_")
#: vLLM's variables that affect what is chosen or started; others may contain secrets.
_VLLM_NAMES = (
    "VLLM_PLUGINS",
    "VLLM_TARGET_DEVICE",
    "VLLM_USE_V2_MODEL_RUNNER",
    "VLLM_ENABLE_V1_MULTIPROCESSING",
    "VLLM_WORKER_MULTIPROC_METHOD",
    "VLLM_LOGGING_LEVEL",
    "HF_HUB_OFFLINE",
    "PYTHONDONTWRITEBYTECODE",
)
#: Folders of crash reports on macOS: the user's, and the machine's, which includes panics.
FOLDERS = (
    Path("~/Library/Logs/DiagnosticReports"),
    Path("/Library/Logs/DiagnosticReports"),
)
#: Names of reports that may concern us: Python, our commands, the kernel, and out-of-memory events.
#: Others would reveal what else the user runs.
_OURS = ("python", "vllm", "panic", "kernel", "jetsamevent")
_MOST_REPORTS = 20
_SYSCTLS = {"memory_bytes": "hw.memsize", "wired_limit_mb": "iogpu.wired_limit_mb"}

_ADVICE_PYTHON = (
    "Make the environment with a Python for Apple silicon: `uv venv --python 3.12 --seed` in a "
    "terminal that does not run with Rosetta, and install again."
)


@dataclass(frozen=True)
class System:
    """The system's description of itself."""

    name: str  # sys.platform
    machine: str  # platform.machine()
    release: tuple[int, ...]  # macOS's version, such as (26, 1); elsewhere empty
    translated: bool  # by Rosetta
    mlx_wheel: str | None  # tag of the installed mlx-metal, such as py3-none-macosx_26_0_arm64
    chip: str | None = None  # such as Apple M5 Max


def this_system() -> System:
    darwin = sys.platform == "darwin"
    return System(
        name=sys.platform,
        machine=platform.machine(),
        release=macos.release(),
        translated=darwin and sysctl.read(TRANSLATED) == 1,
        mlx_wheel=macos.wheel_tag("mlx-metal"),
        chip=identity.chip(),
    )


def settings() -> Iterator[tuple[str, str]]:
    """Yields the plugin's variables that are set, and their values; paths are shown as "set"."""
    for name, value in sorted(os.environ.items()):
        if name in (*_KNOWN, *_VLLM_NAMES) or name.startswith(_GROUPS):
            yield name, "set" if "/" in value or "~" in value else value


def check_settings() -> Finding:
    """Checks the plugin's variables with the functions that the plugin reads them with."""
    for read in (envs.requested_device, envs.kernels, envs.allow_untested):
        try:
            read()
        except ValueError as error:
            return Finding("settings", "failed", str(error), "Correct the variable, or unset it.")
    unknown = sorted(
        name for name in os.environ if name.startswith("VLLM_METAL_") and name not in _KNOWN
    )
    seen = ", ".join(f"{name}={value}" for name, value in settings()) or "none set"
    if unknown:
        advice = f"Unset {', '.join(unknown)}: nothing reads it. Known are {', '.join(_KNOWN)}."
        return Finding("settings", "warning", seen, advice)
    return Finding("settings", "ok", seen)


def check_processor(system: System) -> Finding:
    """Checks for Apple silicon, and a Python built for it."""
    if system.name != "darwin":
        return Finding("processor", "ok", f"{system.machine}, not a Mac{_openmp_advice(system)}")
    if system.translated:
        seen = "this Python is built for Intel, and Rosetta translates it"
        return Finding("processor", "failed", seen, _ADVICE_PYTHON)
    if system.machine != "arm64":
        seen = f"{system.machine}: MLX has no build for Macs with Intel processors"
        return Finding("processor", "failed", seen, "Use a Mac with Apple silicon (M1 or newer).")
    return Finding("processor", "ok", "Apple silicon, without Rosetta")


def _openmp_advice(system: System) -> str:
    # Users of `LLM` on Linux should export these, because OpenMP reads them when it is loaded.
    if system.name != "linux" or openmp.EXPORTED:
        return ""
    wanted = " ".join(f"{name}={value}" for name, value in openmp.SETTINGS.items())
    return f"; for `LLM` beside busy programs, export {wanted} before Python starts"


def check_release(system: System) -> Finding:
    """Checks that the installed MLX is built for this macOS."""
    if system.name != "darwin":
        return Finding("system", "ok", platform.platform())
    found = ".".join(map(str, system.release)) or "of unknown release"
    if system.release and system.release < OLDEST_MACOS:
        advice = "Update macOS to 14 or newer (System Settings, General, Software Update)."
        return Finding("system", "failed", f"macOS {found}: MLX needs 14 or newer", advice)
    too_new = "macosx_26" in (system.mlx_wheel or "macosx_26")
    if too_new and macos.WHEEL_BUILT_FOR[:1] <= system.release < macos.WHEEL_BUILT_FOR:
        seen = f"macOS {found}, but the installed MLX is built for macOS 26.2"
        advice = (
            "Update macOS to 26.2 or newer (System Settings, General, Software Update). If you "
            f"cannot, install MLX's build for macOS 15, which also runs here:\n{_older_mlx()}"
        )
        return Finding("system", "warning", seen, advice)
    slow = macos.slow_prompts(system.release, system.chip, system.mlx_wheel)
    if slow is not None:
        advice = f"Install MLX's build for macOS 26:\n{_newer_mlx()}"
        return Finding("system", "warning", f"macOS {found}, {system.chip}: {slow}", advice)
    return Finding("system", "ok", f"macOS {found}")


def check_driver(system: System) -> Finding | None:
    """Warns if the GPU driver of this macOS is known to panic; None if this is no Mac."""
    if system.name != "darwin" or not system.release:
        return None
    found, steady = (".".join(map(str, number)) for number in (system.release, STEADY_DRIVER))
    if system.release >= STEADY_DRIVER:
        return Finding("GPU driver", "ok", f"of macOS {found}")
    seen = (
        f"Macs with macOS before {steady} have panicked under MLX, whatever the program and "
        'however little memory it took ("completeMemory() prepare count underflow")'
    )
    advice = f"Update macOS to {steady} or newer: no such panic is known there."
    return Finding("GPU driver", "warning", seen, advice)


def wired_bytes() -> int | None:
    """Returns the bytes that macOS has wired for all programs; None elsewhere."""
    # Memory that a killed process had wired may stay wired until a reboot.
    return getattr(psutil.virtual_memory(), "wired", None)


def _older_mlx() -> str:
    # pip installs a wheel for another system only into a folder given by --target.
    target = ["--target", sysconfig.get_path("purelib")]
    options = ["--upgrade", "--only-binary", ":all:", "--platform", "macosx_15_0_arm64", *target]
    return _pip_install(*options)


def _newer_mlx() -> str:
    # With the true release, so that pip selects the wheel for macOS 26.
    (variable,) = macos.TRUE_RELEASE.items()
    return "=".join(variable) + " " + _pip_install("--force-reinstall")


def _pip_install(*options: str) -> str:
    known = packages.versions()
    pins = [f"{name}=={known.get(name, 'VERSION')}" for name in ("mlx", "mlx-metal")]
    return shlex.join([sys.executable, "-m", "pip", "install", "--no-deps", *options, *pins])


def probe_device(progress: Progress) -> ChildResult:
    """Queries MLX for its device in a child process, because the import may crash."""
    return run(python("vllm_metal.cli.doctor.children.facts", "device"), progress)


def check_device(looked: ChildResult, requested: envs.Device | None) -> Finding:
    """Checks that MLX runs on the requested device."""
    reported = looked.reported
    if not looked.ok:
        advice = (
            "The last lines say why. If MLX was installed for another system or processor, install "
            "it again in an environment made on this machine."
        )
        return Finding(
            "MLX",
            "failed",
            f"a process that imports MLX {looked.exit_reason}",
            advice,
            looked.lines,
        )
    seen = f"runs on {reported['device']}: {reported['chip']} ({reported['architecture']})"
    if requested == "metal" and not reported["metal"]:
        advice = (
            "Run in a session that has access to the GPU (not every virtual machine has one), or "
            "set VLLM_METAL_DEVICE=cpu for MLX's CPU backend."
        )
        return Finding("MLX", "failed", "finds no Metal device", advice)
    return Finding("MLX", "ok", seen)


def check_memory(reported: dict[str, Any], weights: int) -> Finding:
    """Checks that the model to try fits into the free memory.

    `reported`: message of the process of `probe_device`; `weights`: bytes.
    """
    memory, needed = reported["memory_bytes"], weights + PROCESSES_BYTES
    seen = (
        f"{reported['ram_bytes'] / GIB:.1f} GiB, of which MLX may use {memory['total'] / GIB:.1f} "
        f"and {memory['available'] / GIB:.1f} are free"
    )
    if memory["available"] >= needed:
        return Finding("memory", "ok", seen)
    advice = (
        f"The model to be tried needs about {needed / GIB:.1f} GiB: close other programs, browsers "
        "first, before you start an engine."
    )
    return Finding("memory", "warning", seen, advice)


def check_disk(folder: Path) -> Finding:
    """Checks for space and permissions in the cache folder, which may not exist yet."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        seen = f"cannot write to the cache folder {folder}"
        advice = "Give yourself access to it, or choose another folder: VLLM_METAL_CACHE=FOLDER."
        return Finding("disk", "failed", seen, advice)
    free = shutil.disk_usage(there).free
    seen = f"{free / GIB:.1f} GiB free for the cache folder {folder}"
    if free < CACHE_BYTES:
        advice = (
            f"Converted models need up to {CACHE_BYTES / GIB:.1f} GiB: free some space, or choose "
            "a folder on another disk: VLLM_METAL_CACHE=FOLDER."
        )
        return Finding("disk", "warning", seen, advice)
    return Finding("disk", "ok", seen)


def facts() -> dict[str, Any]:
    """Returns MLX's wheel tags and, on a Mac, release, chip, GPU and memory; None if unknown."""
    found: dict[str, Any] = {
        "wheels": {name: macos.wheel_tag(name) for name in ("mlx", "mlx-metal")},
        "machine": platform.machine(),
    }
    if sys.platform != "darwin":
        return found
    found |= {fact: sysctl.read(name) for fact, name in _SYSCTLS.items()}
    found["sw_vers"] = macos.output("sw_vers").splitlines()
    return found | _graphics()


def crash_reports(folders: Sequence[Path] = FOLDERS) -> list[str]:
    """Returns file names of the newest crash reports that may be of our processes, newest first."""
    found = []
    for folder in folders:
        try:
            paths = [p for p in folder.expanduser().iterdir() if p.suffix in (".ips", ".panic")]
            found += [(path.stat().st_mtime, path.name) for path in paths]
        except OSError:  # missing, or not readable for this user
            continue
    ours = [entry for entry in found if entry[1].lower().startswith(_OURS)]
    return [name for _, name in sorted(ours, reverse=True)][:_MOST_REPORTS]


def _graphics() -> dict[str, Any]:
    try:
        displays = json.loads(macos.output("system_profiler", "SPDisplaysDataType", "-json"))
        first = displays["SPDisplaysDataType"][0]
    except (ValueError, LookupError):
        first = {}
    return {"chip": first.get("sppci_model"), "gpu_cores": first.get("sppci_cores")}
