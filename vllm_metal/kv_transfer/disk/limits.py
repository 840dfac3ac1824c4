# SPDX-License-Identifier: Apache-2.0
"""Limits of a cache on disk: its size, and the bytes written per day."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from vllm_metal.kv_transfer.disk import ledger

_MOST = 50 * 10**9  # disks are sold in units of 10**9 bytes
_SHARE_OF_FREE = 10  # a tenth

#: Default limit of the bytes that all engines of a cache write per day: 40 GB. Apple states no
#: endurance; TLC drives of 250 GB are commonly rated for 150 TB of writes in five years (Samsung
#: 980: 150 TBW), which is 150 TB / (5 × 365 days) = 82 GB a day. Half of it is left for the rest.
DEFAULT_DAILY_WRITE_BYTES = 40 * 10**9


@dataclass(frozen=True)
class Limits:
    """Limits of a cache: its size on disk, and the bytes written per day."""

    max_bytes: int  # total size of files under the root, each rounded up to 4096
    daily_write_bytes: int | None  # by all engines together, per calendar day; None: unlimited


def default_max_bytes(path: Path) -> int:
    """Returns the lesser of 50 GB and a tenth of the free space at `path`; may raise OSError."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    # The cache's own bytes count as free, or the limit would shrink at every start.
    held = ledger.read_balance(path)
    free = shutil.disk_usage(there).free + (held.bytes if held is not None and held.is_known else 0)
    return min(free // _SHARE_OF_FREE, _MOST)
