# SPDX-License-Identifier: Apache-2.0
"""Lists, removes and verifies the contents of a cache; safe while engines use it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_metal.kv_transfer.disk import block_file, engine_lock, eviction, layout
from vllm_metal.kv_transfer.disk.ledger import UNKNOWN, Ledger
from vllm_metal.kv_transfer.disk.scan import FoundBlock, scan

#: Bytes that a verification reads at once.
_PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class NamespaceSummary:
    """Number, size and last use of a namespace's blocks."""

    blocks: int
    bytes: int
    last_used: float  # seconds since the epoch


@dataclass(frozen=True)
class FingerprintSummary:
    """Facts and namespaces of a fingerprint."""

    facts: Mapping[str, Any]  # from its manifest; empty without one
    namespaces: Mapping[str, NamespaceSummary]


@dataclass(frozen=True)
class Summary:
    """Size and fingerprints of a cache."""

    bytes: int  # total size of files
    fingerprints: Mapping[str, FingerprintSummary]


@dataclass(frozen=True)
class Selection:
    """Selects blocks that meet all conditions; None is no condition."""

    fingerprint: str | None = None  # or a prefix of it
    namespace: str | None = None
    used_before: float | None = None  # seconds since the epoch

    @property
    def is_all(self) -> bool:
        return self == Selection()

    def has(self, block: FoundBlock) -> bool:
        return (
            (self.fingerprint is None or block.name.fingerprint.startswith(self.fingerprint))
            and (self.namespace is None or block.name.namespace == self.namespace)
            and (self.used_before is None or block.used_ns < self.used_before * 1e9)
        )


@dataclass(frozen=True)
class Verified:
    """Good, bad and removed blocks of a verified cache."""

    num_good: int
    bad: list[Path]  # not removed
    num_removed: int


def check_is_cache(root: Path) -> None:
    """Raises ValueError if a folder is not a cache or does not exist."""
    if not layout.is_cache(root):
        raise ValueError(f"{root} is not a prefix cache; give the folder of prefix_cache_dir")


def summary(root: Path) -> Summary:
    """Summarizes a cache; raises OSError if it cannot be read."""
    found = scan(root, clean=False)
    blocks: dict[str, dict[str, list[FoundBlock]]] = defaultdict(lambda: defaultdict(list))
    for block in found.blocks:
        blocks[block.name.fingerprint][block.name.namespace].append(block)
    manifests = layout.read_manifests(root)
    return Summary(
        found.bytes,
        {
            fingerprint: FingerprintSummary(
                manifests.get(fingerprint, {}),
                {name: _summarize(of) for name, of in sorted(blocks[fingerprint].items())},
            )
            for fingerprint in sorted({*blocks, *manifests})
        },
    )


def _summarize(blocks: list[FoundBlock]) -> NamespaceSummary:
    return NamespaceSummary(
        len(blocks),
        sum(block.room for block in blocks),
        max(block.used_ns for block in blocks) / 1e9,
    )


def select(root: Path, selection: Selection) -> list[FoundBlock]:
    """Returns the selected blocks; raises OSError if the cache cannot be read."""
    return [block for block in scan(root, clean=False).blocks if selection.has(block)]


def remove(root: Path, selection: Selection) -> tuple[int, int]:
    """Removes selected blocks; returns their number and bytes.

    A selection of all removes the whole cache, unless an engine uses it.

    Raises OSError: the cache cannot be read or locked, or a block cannot be removed.
    """
    with closing(Ledger(root)) as ledger, ledger.locked() as balance:
        balance = balance or UNKNOWN
        ledger.write_balance(balance)  # so that the scan counts the ledger's own file
        found = scan(root)
        ledger.write_balance(replace(balance, bytes=found.bytes))
        meant = [block for block in found.blocks if selection.has(block)]
        gone = [block for block in meant if eviction.remove(block.path)]
        left = found.bytes - sum(block.room for block in gone)
        left -= eviction.remove_empty_folders(root, gone)
        if selection.is_all:
            left -= eviction.remove_blockless(root)
        ledger.write_balance(replace(balance, bytes=left))
        if len(gone) < len(meant):
            raise OSError(f"{len(meant) - len(gone)} blocks could not be removed from {root}")
        if selection.is_all and not engine_lock.running_engines(root):
            _remove_root(root)
        return len(gone), sum(block.room for block in gone)


def _remove_root(root: Path) -> None:
    with suppress(OSError):
        os.rmdir(root / layout.ENGINES)
    os.unlink(root / layout.LEDGER)  # an engine that waits for its lock creates another one
    with suppress(OSError):  # it has files of other programs
        os.rmdir(root)


def verify(root: Path, remove_bad: bool, progress: Callable[[int], None]) -> Verified:
    """Reads and checks every block; raises OSError if the cache cannot be read.

    `progress` is called with the bytes read since the last call.
    """
    scratch = memoryview(bytearray(_PIECE_BYTES))
    num_good = num_removed = 0
    bad = []
    with closing(Ledger(root)) as ledger:
        for block in scan(root, clean=False).blocks:
            try:
                identity = eviction.identity_of(os.lstat(block.path))
                good = _is_good(block, scratch)
            except FileNotFoundError:
                continue  # evicted meanwhile
            progress(block.room)
            if good:
                num_good += 1
            elif remove_bad and _remove_bad(ledger, block.path, identity):
                num_removed += 1
            else:
                bad.append(block.path)
    return Verified(num_good, bad, num_removed)


def _is_good(block: FoundBlock, scratch: memoryview) -> bool:
    folder = f"{block.name.fingerprint}/{block.name.namespace}"
    try:
        return block_file.is_good(block.path, folder, block.name.key, scratch)
    except FileNotFoundError:
        raise
    except OSError:
        return False


def _remove_bad(ledger: Ledger, path: Path, identity: tuple[int, int]) -> bool:
    with suppress(OSError), ledger.locked() as balance:
        eviction.remove_counted(ledger, balance or UNKNOWN, path, identity)
        return True
    return False
