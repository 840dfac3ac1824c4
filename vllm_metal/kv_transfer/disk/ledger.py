# SPDX-License-Identifier: Apache-2.0
"""A cache's ledger: the bytes its files take, and how many were written today.

Processes hold the ledger's lock (flock) while they create, rename or remove files of a cache, so
the ledger matches the files whenever it is locked. Only a block's contents are written without it,
into a file of full size. Additions are entered before the file is created, and removals after it is
gone: if a process dies in between, the ledger is too high, never too low.
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

#: Seconds to wait for the lock. A holder at most scans the cache: a second for 100,000 files.
LOCK_TIMEOUT = 10.0


@dataclass(frozen=True)
class Balance:
    """The contents of a ledger."""

    bytes: int  # total size of files under the root
    day: int  # proleptic ordinal of the local calendar day; 0: none yet
    written: int  # bytes written on that day

    @property
    def is_known(self) -> bool:
        """Whether the cache's files have been scanned, so that `bytes` is their total."""
        return self.bytes < UNKNOWN.bytes // 2

    def plus(self, number: int) -> Balance:
        """Returns the balance with a number of bytes added, which may be negative."""
        return replace(self, bytes=max(0, self.bytes + number))


#: Before the first scan: so many bytes that any process that needs room scans.
UNKNOWN = Balance(bytes=2**62, day=0, written=0)


def read_balance(root: Path) -> Balance | None:
    """Reads a root's ledger without its lock; None if it is missing or damaged."""
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
    """The ledger file in a cache's root folder; the first `locked` opens it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()  # flock does not exclude threads of the same process
        self._descriptor: int | None = None

    @contextmanager
    def locked(self) -> Iterator[Balance | None]:
        """Holds the lock; yields the balance, None if the ledger is new or damaged.

        Raises OSError if the ledger cannot be opened for writing, or others hold the lock too long.
        """
        with self._lock:
            descriptor = self._locked_descriptor()
            try:
                yield _balance(os.pread(descriptor, RECORD_BYTES, 0))
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)

    def write_balance(self, balance: Balance) -> None:
        """Writes a balance; the caller holds the lock. Raises OSError if it cannot be written."""
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
            self._close()  # it was removed, and others may have created another one


def _wait_for_lock(descriptor: int) -> None:
    # A process that was stopped may hold the lock forever.
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
