# SPDX-License-Identifier: Apache-2.0
"""Decides how many bytes a cache on disk may hold, and how many it may write in a day."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from vllm_metal.kv_transfer.disk import ledger

_MOST = 50 * 10**9  # disks are sold by 10**9
_SHARE_OF_FREE = 10  # a tenth

#: Bytes that all engines of a cache write in a day, by default: 40 GB. Apple names no endurance;
#: TLC drives of 250 GB are commonly guaranteed for 150 TB of writes in five years (Samsung 980:
#: 150 TBW), which is 150 TB / (5 × 365 days) = 82 GB a day. Half of it is left to all else.
DEFAULT_DAILY_WRITE_BYTES = 40 * 10**9


@dataclass(frozen=True)
class Limits:
    """What a cache may take of a disk."""

    max_bytes: int  # of all files under the root, each rounded up to 4096
    daily_write_bytes: int | None  # of all engines together, a calendar day; None: no budget


def default_max_bytes(path: Path) -> int:
    """The lesser of 50 GB and a tenth of the free space where `path` is, or will be.

    What the cache in `path` holds already counts as free: the limit would otherwise shrink at
    every start.

    Raises:
        OSError: the free space cannot be read.
    """
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    held = ledger.peek(path)
    free = shutil.disk_usage(there).free + (held.bytes if held is not None and held.is_known else 0)
    return min(free // _SHARE_OF_FREE, _MOST)
