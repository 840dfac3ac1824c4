# SPDX-License-Identifier: Apache-2.0
"""Evicts the least recently used blocks; disk/space.py decides when and how many bytes."""

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
    """Removes least recently used blocks until at most `allowed_bytes` remain, if possible.

    Calls `forget` with each removed block. The manifest of the fingerprint `keep` stays in any
    case. Returns the bytes that remain.
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
    """Removes a file if it exists; returns whether it is gone."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
        return True
    return False


def identity_of(status: os.stat_result) -> tuple[int, int]:
    """Returns device and inode, which identify a file whatever its name."""
    return status.st_dev, status.st_ino


def remove_counted(
    ledger: Ledger, balance: Balance, path: Path, identity: tuple[int, int] | None
) -> None:
    """Removes a file if it exists, and subtracts its bytes from `balance` in the locked ledger.

    If `identity` is given, keeps a file with a different one. Raises OSError if removing fails.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if identity is None or identity == identity_of(status):
        os.unlink(path)
        ledger.write_balance(balance.plus(-layout.bytes_on_disk(status.st_size)))


def remove_blockless(root: Path) -> int:
    """Removes fingerprints' folders that hold no blocks; returns how many bytes this freed."""
    return sum(_remove_emptied(root / name) for name in layout.fingerprints(root))


def remove_empty_folders(root: Path, gone: Iterable[FoundBlock], keep: str | None = None) -> int:
    """Removes folders that the `gone` blocks left empty; returns bytes of removed manifests."""
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
    freed = 0
    with suppress(OSError):
        if os.listdir(folder) == [layout.MANIFEST]:
            manifest = folder / layout.MANIFEST
            size = manifest.stat().st_size
            os.unlink(manifest)
            freed = layout.bytes_on_disk(size)
        os.rmdir(folder)
    return freed
