# SPDX-License-Identifier: Apache-2.0
"""Evicts the least recently used pages from disk; disk/space.py says when and how many bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from vllm_metal.kv_transfer.disk import layout
from vllm_metal.kv_transfer.disk.ledger import Balance, Ledger
from vllm_metal.kv_transfer.disk.scan import FoundBlock, RootFiles


def evict(
    root: Path,
    found: RootFiles,
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
    with suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False


def identity_of(status: os.stat_result) -> tuple[int, int]:
    """Device and inode: which file it is, whatever its name."""
    return status.st_dev, status.st_ino


def remove_counted(
    ledger: Ledger, balance: Balance, path: Path, identity: tuple[int, int] | None
) -> None:
    """Removes a file, if it is there, and its bytes from the ledger, which is locked.

    Args:
        balance: what the ledger says.
        identity: another file in its place stays.

    Raises:
        OSError: it cannot be removed.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if identity is None or identity == identity_of(status):
        os.unlink(path)
        ledger.enter(balance.plus(-layout.room_of(status.st_size)))


def remove_blockless(root: Path) -> int:
    """Removes the folders of fingerprints that have no blocks; bytes of their manifests."""
    return sum(_remove_emptied(root / name) for name in layout.fingerprints(root))


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
