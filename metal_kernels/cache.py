# SPDX-License-Identifier: Apache-2.0
"""Names the one folder where results are kept between runs; as a script: what may be removed.

It imports the standard library only and runs on Python 3.9, so that `make distclean` can ask it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: Names of the folders in it, one for each kind of result. `make distclean` removes them.
PARTS = (
    "gguf",
    "interpreter",
    "logs",
    "models",
    "selfcheck",
    "source-archives",  # of earlier versions, as are "vllm-tests"
    "tuned",
    "vllm-tests",
    "weights",
)


def cache_dir() -> Path:
    """``VLLM_METAL_CACHE``, else ``vllm-metal`` in the platform's cache folder."""
    if chosen := os.environ.get("VLLM_METAL_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vllm-metal"
    base = os.environ.get("XDG_CACHE_HOME")  # the specification says to ignore relative ones
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "vllm-metal"


if __name__ == "__main__":
    there = [cache_dir() / part for part in PARTS if (cache_dir() / part).is_dir()]
    if os.environ.get("VLLM_METAL_CACHE"):
        # The user chose the folder, and may keep files of their own there under these names.
        for folder in there:
            print(f"left to you, as VLLM_METAL_CACHE names its folder: {folder}", file=sys.stderr)
    else:
        print("\n".join(map(str, there)), end="\n" if there else "")
