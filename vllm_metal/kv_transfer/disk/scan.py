# SPDX-License-Identifier: Apache-2.0
"""Lists the files of a root."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vllm_metal.kv_transfer.disk import engine_lock, layout
from vllm_metal.kv_transfer.disk.layout import BlockName


@dataclass(frozen=True)
class FoundBlock:
    """Path, size and last use of a block's file."""

    path: Path
    name: BlockName
    room: int  # bytes on disk
    used_ns: int  # time of the last use: its mtime


@dataclass(frozen=True)
class RootFiles:
    """Total size of the files below a cache's root folder in bytes, and the cache's blocks."""

    bytes: int  # total size of files, including other programs'
    blocks: list[FoundBlock]


def scan(root: Path, clean: bool = True) -> RootFiles:
    """Lists every file below a cache's root folder.

    Args:
        clean: remove incomplete files of dead engines. Requires the locked ledger, which makes the
            total exact.

    Raises:
        OSError: the root cannot be read.
    """
    running_engines = engine_lock.running_engines(root) if clean else set()
    size = 0
    blocks = []
    for entry in _files(root):
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        writer = layout.writer_of(entry.name)
        if clean and writer is not None and writer not in running_engines and _is_ours(root, entry):
            with suppress(OSError):
                os.unlink(entry.path)
                continue
        room = layout.bytes_on_disk(status.st_size)
        size += room
        path = Path(entry.path)
        if (name := layout.block_name(root, path)) is not None:
            blocks.append(FoundBlock(path, name, room, status.st_mtime_ns))
    return RootFiles(size, blocks)


def _is_ours(root: Path, entry: os.DirEntry[str]) -> bool:
    # Users may put other files into a root; ours are in a fingerprint's folder.
    return bool(layout.FINGERPRINT.fullmatch(Path(entry.path).relative_to(root).parts[0]))


def _files(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            found = list(entries)
    except FileNotFoundError:
        return  # removed meanwhile
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(entry.path)
        else:
            yield entry
