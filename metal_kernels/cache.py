# SPDX-License-Identifier: Apache-2.0
"""Defines the cache folder; as a script, lists what `make distclean` may remove.

Only uses the standard library, and runs on Python 3.9, for `make distclean`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: Folders in it, one per kind of result. `make distclean` removes them.
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
    """Returns ``VLLM_METAL_CACHE``, else ``vllm-metal`` in the platform's cache folder."""
    if chosen := os.environ.get("VLLM_METAL_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "vllm-metal"
    base = os.environ.get("XDG_CACHE_HOME")  # the XDG specification says to ignore relative paths
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "vllm-metal"


if __name__ == "__main__":
    there = [cache_dir() / part for part in PARTS if (cache_dir() / part).is_dir()]
    if os.environ.get("VLLM_METAL_CACHE"):
        # The user chose the folder, and may keep files of their own there under these names.
        for folder in there:
            print(f"kept, because VLLM_METAL_CACHE names it: {folder}", file=sys.stderr)
    else:
        print("\n".join(map(str, there)), end="\n" if there else "")
