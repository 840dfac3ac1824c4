# SPDX-License-Identifier: Apache-2.0
"""Removes blocks, and the folders that they leave empty. The ledger is locked meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from vllm_metal.kv_transfer.disk import layout
from vllm_metal.kv_transfer.disk.scan import Found, FoundBlock


def evict(
    root: Path,
    found: Found,
    allowed_bytes: int,
    forget: Callable[[FoundBlock], None],
    keep: str | None = None,
) -> int:
    """Removes the least recently used blocks until the files take at most `allowed_bytes`.

    Args:
        forget: is told of each block that is gone.
        keep: a fingerprint whose manifest stays even when its blocks are gone.

    Returns the bytes that are left, which are more where not enough could be removed.
    """
    left = found.bytes
    oldest_first = iter(sorted(found.blocks, key=lambda block: (block.used_ns, block.path)))
    gone = []
    while left > allowed_bytes and (block := next(oldest_first, None)) is not None:
        if remove(block.path):
            left -= block.room
            gone.append(block)
            forget(block)
    return left - remove_empty_folders(root, gone, keep)


def remove(path: Path) -> bool:
    """Whether a file is gone, now or before."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def remove_empty_folders(root: Path, gone: Iterable[FoundBlock], keep: str | None = None) -> int:
    """Removes what blocks that are gone leave empty: folders, and manifests of their fingerprints.

    Returns the bytes that the manifests counted for.
    """
    freed = 0
    fingerprints = set()
    for shard in {block.path.parent for block in gone}:
        fingerprints.add(shard.parent.parent)
        with suppress(OSError):
            os.rmdir(shard)
            os.rmdir(shard.parent)
    for folder in fingerprints:
        if folder.name != keep:
            freed += _remove_emptied(folder)
    return freed


def _remove_emptied(folder: Path) -> int:
    """Removes the folder of a fingerprint that has nothing but a manifest; bytes of the latter."""
    freed = 0
    with suppress(OSError):
        if os.listdir(folder) == [layout.MANIFEST]:
            manifest = folder / layout.MANIFEST
            size = manifest.stat().st_size
            os.unlink(manifest)
            freed = layout.room_of(size)
        os.rmdir(folder)
    return freed
