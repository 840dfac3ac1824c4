# SPDX-License-Identifier: Apache-2.0
"""Checks that the build of MLX suits the macOS release and the chip. Does not import MLX."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from vllm_metal.device import identity

#: MLX's wheel for macOS 26 is built for 26.2 (LC_BUILD_VERSION of libmlx.dylib and the target of
#: mlx.metallib in mlx-metal 0.32.4), but wheel tags have major releases only, so installers select
#: it on 26.0 and 26.1 too: https://github.com/ml-explore/mlx/issues/4525.
WHEEL_BUILT_FOR = (26, 2)
#: First chip generation whose GPU has matrix units; only that wheel has kernels for them.
MATRIX_UNITS = 5
SLOW_PROMPTS = (
    "MLX's wheel for macOS {built} has no kernels for the matrix units of an M5 or newer: prompts "
    "are 2 to 3 times slower than with the wheel for macOS 26"
)
#: macOS reports 16 instead of 26 to programs linked against an older SDK, as a Python may be
#: (python/cpython#135675). Its own command, with this variable, reports the real number.
TRUE_RELEASE = {"SYSTEM_VERSION_COMPAT": "0"}


def release() -> tuple[int, ...]:
    """Returns the macOS release, such as ``(26, 1)``; empty elsewhere, or if unknown."""
    if sys.platform != "darwin":
        return ()
    text = output("sw_vers", "-productVersion").strip() or platform.mac_ver()[0]
    return tuple(int(number) for number in text.split(".") if number.isdigit())


def output(*command: str) -> str:
    """Returns what a system command prints; empty if it fails."""
    options: Any = {"capture_output": True, "text": True, "timeout": 20}
    try:
        return subprocess.run(command, env=os.environ | TRUE_RELEASE, **options).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def wheel_tag(package: str) -> str | None:
    """Returns an installed wheel's tag, such as ``py3-none-macosx_26_0_arm64``, or None."""
    try:
        text = distribution(package).read_text("WHEEL") or ""
    except PackageNotFoundError:
        return None
    tags = (line.partition(":")[2].strip() for line in text.splitlines() if line[:4] == "Tag:")
    return next(tags, None)


def slow_prompts(found: tuple[int, ...], chip: str | None, wheel: str | None) -> str | None:
    """Returns a warning if the MLX build lacks support for the chip's matrix units, else None.

    Args:
        found: macOS release.
        chip: name by `identity.chip`.
        wheel: tag of the installed mlx-metal.
    """
    generation = re.match(r"Apple M(\d+)", chip or "")
    built = re.search(r"macosx_(\d+)_", wheel or "")
    if generation is None or built is None or found < WHEEL_BUILT_FOR:
        return None
    if int(generation[1]) < MATRIX_UNITS or int(built[1]) >= WHEEL_BUILT_FOR[0]:
        return None
    return SLOW_PROMPTS.format(built=built[1])


def slow_prompts_here() -> str | None:
    """Returns `slow_prompts` for this machine."""
    chip = identity.chip()
    return slow_prompts(release(), chip, wheel_tag("mlx-metal")) if chip else None
