# SPDX-License-Identifier: Apache-2.0
"""The file of a block: a header of 128 bytes, then the payload.

Header, little-endian: magic (8 bytes), length of the key (8), length of the payload (8), digest of
the folder's name (16), key (64, padded with zeros), zeros (8), checksum (16). The checksum is the
first 16 bytes of the BLAKE3 of the payload and the header before it, so that any change of the file
is found. A reader knows the whole header but the checksum, and compares it.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

#: Raised with the format: files of another one are bad, and leave the disk.
_MAGIC = b"VMKVBLK\x01"
_FIELDS = struct.Struct("<8sQQ16s64s8x")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
MAX_KEY_BYTES = 64

#: What one call of preadv or pwritev takes: buffers (POSIX: at least 16), bytes (macOS: 2**31).
_MAX_BUFFERS = max(16, os.sysconf("SC_IOV_MAX"))
_MAX_BYTES = 2**28
#: Bytes that are hashed in one go: BLAKE3 hashes 12 KiB at a third of the rate of 256 KiB.
_HASHED_BYTES = 2**18


@dataclass(frozen=True)
class BlockFile:
    """Which block a file holds."""

    folder: str  # "<fingerprint>/<namespace>"
    key: bytes  # at most 64 bytes
    payload_bytes: int

    def __post_init__(self) -> None:
        if not 0 < len(self.key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(self.key)}")

    @property
    def size(self) -> int:
        return HEADER_BYTES + self.payload_bytes

    def header(self) -> bytes:
        """The header before the checksum."""
        digest = blake3(self.folder.encode()).digest(length=16)
        return _FIELDS.pack(_MAGIC, len(self.key), self.payload_bytes, digest, self.key)

    def checksum(self, payload: Iterable[memoryview | bytes]) -> bytes:
        """The checksum of the payload and the header."""
        hasher = blake3()
        for part in payload:
            hasher.update(part)
        hasher.update(self.header())  # last: BLAKE3 is three times as fast on aligned parts
        return hasher.digest(length=_CHECKSUM_BYTES)


def as_bytes(parts: Sequence[memoryview]) -> list[memoryview]:
    """The same memory as bytes, without empty parts.

    Raises:
        TypeError: a part is not contiguous.
    """
    return [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]


def total(parts: Iterable[memoryview]) -> int:
    """Bytes of all parts."""
    return sum(part.nbytes for part in parts)


def write(descriptor: int, block: BlockFile, payload: Sequence[memoryview]) -> None:
    """Writes a block's file from its beginning.

    Args:
        payload: bytes, `block.payload_bytes` altogether.

    Raises:
        OSError: not everything was written.
    """
    header = block.header() + block.checksum(_joined(payload))
    offset = 0
    for batch in _batches([memoryview(header), *payload]):
        while batch:
            written = os.pwritev(descriptor, batch, offset)
            if written == 0:
                raise OSError("the file system takes no more bytes")
            offset += written
            batch = _after(batch, written)


def read(descriptor: int, block: BlockFile, payload: Sequence[memoryview]) -> bool:
    """Fills `payload` from a block's file; False: the file is not this block, whole.

    Args:
        payload: writable bytes, `block.payload_bytes` altogether. Undefined after False.

    Raises:
        OSError: the file cannot be read.
    """
    if os.fstat(descriptor).st_size != block.size:
        return False
    header = bytearray(HEADER_BYTES)
    offset = 0
    for batch in _batches([memoryview(header), *payload]):
        while batch:
            got = os.preadv(descriptor, batch, offset)
            if got == 0:
                return False  # shorter than it was
            offset += got
            batch = _after(batch, got)
    return header == block.header() + block.checksum(_joined(payload))


def is_good(path: Path, folder: str, key: bytes, scratch: memoryview) -> bool:
    """Whether a file holds the block that its path names, whole.

    Args:
        scratch: writable bytes, any number.

    Raises:
        OSError: the file cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        block = BlockFile(folder, key, os.fstat(descriptor).st_size - HEADER_BYTES)
        if block.payload_bytes < 0:
            return False
        header = os.pread(descriptor, HEADER_BYTES, 0)
        return header == block.header() + block.checksum(_pieces(descriptor, block, scratch))
    finally:
        os.close(descriptor)


def _pieces(descriptor: int, block: BlockFile, scratch: memoryview) -> Iterator[memoryview]:
    offset = HEADER_BYTES
    while offset < block.size and (got := os.preadv(descriptor, [scratch], offset)):
        yield scratch[:got]
        offset += got


def _joined(parts: Iterable[memoryview]) -> Iterator[memoryview | bytes]:
    """The same bytes in pieces that are not small, copied where parts are."""
    batch: list[memoryview] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += part.nbytes
        if size >= _HASHED_BYTES:
            yield batch[0] if len(batch) == 1 else b"".join(batch)
            batch, size = [], 0
    yield b"".join(batch)


def _batches(buffers: list[memoryview]) -> Iterator[list[memoryview]]:
    """The buffers in order, as many in each list as one system call takes."""
    batch: list[memoryview] = []
    size = 0
    for buffer in buffers:
        for start in range(0, buffer.nbytes, _MAX_BYTES):
            piece = buffer[start : start + _MAX_BYTES]
            if len(batch) == _MAX_BUFFERS or size + piece.nbytes > _MAX_BYTES:
                yield batch
                batch, size = [], 0
            batch.append(piece)
            size += piece.nbytes
    yield batch


def _after(batch: list[memoryview], done: int) -> list[memoryview]:
    """What is left of a batch when `done` bytes of it are done."""
    for place, buffer in enumerate(batch):
        if done < buffer.nbytes:
            return [buffer[done:], *batch[place + 1 :]]
        done -= buffer.nbytes
    return []
