# SPDX-License-Identifier: Apache-2.0
"""The file of a block: a header with a checksum, then the payload.

Header, little-endian: magic (8 bytes), key length (8), payload length (8), digest of the folder's
name (16), key (64, zero-padded), zeros (8), checksum (16). The checksum is the first 16 bytes of
the BLAKE3 of the payload and the preceding header, so it detects any change. A reader knows all
other header fields, and compares the whole header.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from vllm_metal.kv_transfer.disk.layout import is_trusted

#: Incremented with the format: files of other formats count as bad and are removed.
_MAGIC = b"VMKVBLK\x01"
_FIELDS = struct.Struct("<8sQQ16s64s8x")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
MAX_KEY_BYTES = 64

#: Bytes of a page per call of preadv or pwritev. macOS rejects 2**31 in one call.
MAX_CALL_BYTES = 2**28


@dataclass(frozen=True)
class BlockFile:
    """Identifies the block in a file."""

    folder: str  # "<fingerprint>/<namespace>"
    key: bytes  # at most 64 bytes
    payload_bytes: int

    def __post_init__(self) -> None:
        if not 0 < len(self.key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(self.key)}")

    @property
    def size(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    def header(self, payload: Iterable[memoryview]) -> bytes:
        """Returns the header for a payload, given as consecutive pieces."""
        digest = blake3(self.folder.encode()).digest(length=16)
        header = _FIELDS.pack(_MAGIC, len(self.key), self.payload_bytes, digest, self.key)
        hasher = blake3()
        for piece in payload:
            hasher.update(piece)
        hasher.update(header)  # last: BLAKE3 is three times as fast on aligned pieces
        return header + hasher.digest(length=_CHECKSUM_BYTES)


def write(descriptor: int, block: BlockFile, page: memoryview) -> None:
    """Writes a block's file from contiguous `page`; OSError if not all could be written."""
    header = block.header([page])
    if not _transfer(os.pwritev, descriptor, memoryview(header), page):
        raise OSError("the file system takes no more bytes")


def read(descriptor: int, block: BlockFile, page: memoryview) -> bool:
    """Reads a file into writable, contiguous `page`; False if it is not exactly this block.

    After False, `page` is undefined. Raises OSError if the file cannot be read.
    """
    found = os.fstat(descriptor)
    if found.st_size != block.size or not is_trusted(found):
        return False
    header = bytearray(HEADER_BYTES)
    if not _transfer(os.preadv, descriptor, memoryview(header), page):
        return False  # truncated since fstat
    return header == block.header([page])


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    descriptor: int,
    header: memoryview,
    page: memoryview,
) -> bool:
    """Transfers a whole file by preadv or pwritev; False: a call transferred nothing."""
    done, size = 0, len(header) + len(page)
    while done < size:
        start = max(0, done - len(header))
        buffers = [header[done:], page[start : start + MAX_CALL_BYTES]]
        moved = call(descriptor, buffers if done < len(header) else buffers[1:], done)
        if moved == 0:
            return False
        done += moved
    return True


def is_good(path: Path, folder: str, key: bytes, scratch: memoryview) -> bool:
    """Returns whether a file is exactly the block that its path names; OSError if unreadable.

    `scratch` is memory of any size for reading.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        block = BlockFile(folder, key, found.st_size - HEADER_BYTES)
        if block.payload_bytes < 0 or not is_trusted(found):
            return False
        header = os.pread(descriptor, HEADER_BYTES, 0)
        return header == block.header(_pieces(descriptor, block, scratch))
    finally:
        os.close(descriptor)


def _pieces(descriptor: int, block: BlockFile, scratch: memoryview) -> Iterator[memoryview]:
    offset = HEADER_BYTES
    while offset < block.size and (got := os.preadv(descriptor, [scratch], offset)):
        yield scratch[:got]
        offset += got
