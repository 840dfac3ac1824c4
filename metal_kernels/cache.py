# SPDX-License-Identifier: Apache-2.0
"""The one folder where results are kept between runs; as a script, prints what lies there.

It imports the standard library only and runs on Python 3.9, so that `make distclean` can ask it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: All that is kept, each in a folder of its own: what `make distclean` removes. Others' files may
#: lie beside them where ``VLLM_METAL_CACHE`` names a folder.
PARTS = ("interpreter", "models", "selfcheck", "vllm-sources", "vllm-tests")


def cache_dir() -> Path:
    """``VLLM_METAL_CACHE``, else ``vllm-metal`` in the platform's cache folder."""
    if chosen := os.environ.get("VLLM_METAL_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vllm-metal"
    base = os.environ.get("XDG_CACHE_HOME")  # relative values are to be ignored, says the spec
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "vllm-metal"


if __name__ == "__main__":
    for part in PARTS:
        if (cache_dir() / part).is_dir():
            print(cache_dir() / part)
