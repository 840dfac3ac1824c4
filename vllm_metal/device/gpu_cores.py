# SPDX-License-Identifier: Apache-2.0
"""Asks macOS how many cores the GPU has, which Metal and MLX do not tell."""

from __future__ import annotations

import plistlib
import subprocess
import sys

#: The GPU's entry in IOKit's registry, as XML: some 20 ms, where system_profiler takes seconds.
_COMMAND = ("ioreg", "-a", "-r", "-d", "1", "-c", "AGXAccelerator")
_TIMEOUT_S = 10.0


def count() -> int | None:
    """Returns the number of GPU cores; None: no Mac with Apple silicon, or it does not say."""
    if sys.platform != "darwin":
        return None
    try:
        said = subprocess.run(_COMMAND, capture_output=True, timeout=_TIMEOUT_S).stdout
        cores = plistlib.loads(said)[0]["gpu-core-count"]
    except (OSError, subprocess.TimeoutExpired, plistlib.InvalidFileException, LookupError):
        return None
    except (ValueError, TypeError):  # of the XML, and of what is in it
        return None
    return cores if isinstance(cores, int) and cores > 0 else None
