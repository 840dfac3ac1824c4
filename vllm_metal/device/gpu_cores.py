# SPDX-License-Identifier: Apache-2.0
"""Reads the number of GPU cores from macOS; Metal and MLX do not report it."""

from __future__ import annotations

import plistlib
import subprocess
import sys

#: Prints the GPU's entry in the IOKit registry as XML, in some 20 ms; system_profiler takes
#: seconds.
_COMMAND = ("ioreg", "-a", "-r", "-d", "1", "-c", "AGXAccelerator")
_TIMEOUT_S = 10.0


def count() -> int | None:
    """Returns the number of GPU cores; None if this is no Apple-silicon Mac, or it is unknown."""
    if sys.platform != "darwin":
        return None
    try:
        output = subprocess.run(_COMMAND, capture_output=True, timeout=_TIMEOUT_S).stdout
        cores = plistlib.loads(output)[0]["gpu-core-count"]
    except (OSError, subprocess.TimeoutExpired, plistlib.InvalidFileException, LookupError):
        return None
    except (ValueError, TypeError):  # malformed XML, or unexpected content
        return None
    return cores if isinstance(cores, int) and cores > 0 else None
