# SPDX-License-Identifier: Apache-2.0
"""A cache's ledger: how many bytes its files take, and how many were written today.

Whoever makes, renames or removes files of a cache holds the ledger's lock (flock) meanwhile; the
contents of a block are written without it, into a file that has its full size already. So the
ledger can be compared with the files at any time that it is locked. What is added is entered before
the file is made, and what is taken away after it is gone: a process that dies in between leaves a
ledger that says too much, never too little.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from vllm_metal.kv_transfer.disk import layout

_MAGIC = b"VMKVLDG\x01"
_FIELDS = struct.Struct("<8sQQQ")
_CHECKSUM_BYTES = 16
RECORD_BYTES = _FIELDS.size + _CHECKSUM_BYTES

#: Seconds to wait for the lock. A holder scans the cache at most: a second for 100,000 files.
LOCK_TIMEOUT = 10.0


@dataclass(frozen=True)
class Balance:
    """What a ledger says."""

    bytes: int  # of all files under the root
    day: int  # proleptic ordinal of the local calendar day; 0: none yet
    written: int  # bytes written on that day

    @property
    def is_known(self) -> bool:
        """Whether the files were counted."""
        return self.bytes < UNKNOWN.bytes // 2

    def plus(self, number: int) -> Balance:
        """A balance with more bytes, or fewer."""
        return replace(self, bytes=max(0, self.bytes + number))


#: Before the first scan. So many bytes that whoever wants room scans.
UNKNOWN = Balance(bytes=2**62, day=0, written=0)


def peek(root: Path) -> Balance | None:
    """What the ledger of a root says, without waiting for its lock; None: there is none, whole."""
    try:
        return _balance((root / layout.LEDGER).read_bytes()[:RECORD_BYTES])
    except OSError:
        return None


def _balance(record: bytes) -> Balance | None:
    fields, checksum = record[: _FIELDS.size], record[_FIELDS.size :]
    if len(record) < RECORD_BYTES or checksum != _checksum(fields):
        return None
    magic, *numbers = _FIELDS.unpack(fields)
    return Balance(*numbers) if magic == _MAGIC else None


def _checksum(fields: bytes) -> bytes:
    return blake3(fields).digest(length=_CHECKSUM_BYTES)


class Ledger:
    """The ledger of one root, opened when it is first locked."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()  # flock does not keep threads of one process apart
        self._descriptor: int | None = None

    @contextmanager
    def locked(self) -> Iterator[Balance | None]:
        """Holds the lock; gives what the ledger says, None where it is new or damaged.

        Raises:
            OSError: the ledger cannot be opened for writing, or is locked by another for too long.
        """
        with self._lock:
            descriptor = self._locked_descriptor()
            try:
                yield _balance(os.pread(descriptor, RECORD_BYTES, 0))
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)

    def enter(self, balance: Balance) -> None:
        """Replaces what the ledger says. The caller holds the lock.

        Raises:
            OSError: it cannot be written.
        """
        assert self._descriptor is not None
        fields = _FIELDS.pack(_MAGIC, balance.bytes, balance.day, balance.written)
        os.pwrite(self._descriptor, fields + _checksum(fields), 0)

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _locked_descriptor(self) -> int:
        while True:
            if self._descriptor is None:
                layout.make_folder(self._root, self._root)
                self._descriptor = layout.create_file(self._root / layout.LEDGER, os.O_RDWR)
            _wait_for_lock(self._descriptor)
            if os.fstat(self._descriptor).st_nlink:
                return self._descriptor
            self._close()  # it was removed, and others may have made another one


def _wait_for_lock(descriptor: int) -> None:
    """Takes the lock, or gives up: a process that was stopped may hold it for ever."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    pause = 0.0005
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError("another process holds the ledger's lock") from None
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
