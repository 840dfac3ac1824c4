# SPDX-License-Identifier: Apache-2.0
"""Facts of a machine that no check judges, for those who read a report."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_metal.commands.doctor.machine import wheel_tag
from vllm_metal.device import sysctl

#: Where macOS keeps reports of crashes: the user's, and the machine's, which has its panics.
FOLDERS = (
    Path("~/Library/Logs/DiagnosticReports"),
    Path("/Library/Logs/DiagnosticReports"),
)
#: Reports that may be of ours: Python's and the commands' own, the kernel's, and those of memory
#: that ran out. Others would tell what else the user runs.
_OURS = ("python", "vllm", "panic", "kernel", "jetsamevent")
_MOST_REPORTS = 20
_SYSCTLS = {"memory_bytes": "hw.memsize", "wired_limit_mb": "iogpu.wired_limit_mb"}


def of_machine() -> dict[str, Any]:
    """Tags of MLX's wheels, and, on a Mac, its release, chip, GPU and memory.

    What a machine does not tell is None.
    """
    found: dict[str, Any] = {
        "wheels": {name: wheel_tag(name) for name in ("mlx", "mlx-metal")},
        "machine": platform.machine(),
    }
    if sys.platform != "darwin":
        return found
    found |= {fact: sysctl.read(name) for fact, name in _SYSCTLS.items()}
    found["sw_vers"] = _said("sw_vers").splitlines()
    return found | _graphics()


def crash_reports(folders: Sequence[Path] = FOLDERS) -> list[str]:
    """File names of the newest reports of crashes that may be of ours, the newest first."""
    found = []
    for folder in folders:
        try:
            paths = [*folder.expanduser().iterdir()]
            found += [(path.stat().st_mtime, path.name) for path in paths if _is_ours(path)]
        except OSError:  # there is none, or this user may not read it
            continue
    return [name for _, name in sorted(found, reverse=True)][:_MOST_REPORTS]


def _is_ours(path: Path) -> bool:
    return path.suffix in (".ips", ".panic") and path.name.lower().startswith(_OURS)


def _graphics() -> dict[str, Any]:
    try:
        displays = json.loads(_said("system_profiler", "SPDisplaysDataType", "-json"))
        first = displays["SPDisplaysDataType"][0]
    except (ValueError, LookupError):
        first = {}
    return {"chip": first.get("sppci_model"), "gpu_cores": first.get("sppci_cores")}


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
