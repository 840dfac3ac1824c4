# SPDX-License-Identifier: Apache-2.0
"""Creates and removes files within a root's limits; decides when to evict.

Room for a file is reserved with the ledger locked: its bytes are counted, and a temporary file of
full size is created. The contents are written without the lock; renaming takes the lock again.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date
from enum import Enum
from pathlib import Path

from vllm_metal.kv_transfer.disk import eviction, layout
from vllm_metal.kv_transfer.disk.engine_lock import EngineLock
from vllm_metal.kv_transfer.disk.ledger import UNKNOWN, Balance, Ledger
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.scan import FoundBlock, RootFiles, scan

logger = logging.getLogger(__name__)

#: Eviction goes 5 % below the limit, so that not every write needs one.
_KEPT_OF_100 = 95
#: Seconds without writes after a failed one, such as on a full disk.
_PAUSE = 60.0
#: Seconds until the next eviction after one that could not make enough room.
_NO_ROOM_PAUSE = 10.0
_FULL = "Free space on its disk, or lower prefix_cache_bytes."
_READ_ONLY = "Make the folder that prefix_cache_dir names writable."
_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: (
        "The file system or a limit of this process (ulimit -f) does not allow such files."
    ),
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _READ_ONLY,
    errno.EPERM: _READ_ONLY,
}


class WriteResult(Enum):
    """Outcome of a write: stored, already present, or the reason why not."""

    STORED = "stored"
    PRESENT = "present"  # already on disk
    OVER_BUDGET = "over_budget"  # the daily limit of writes is reached
    NO_ROOM = "no_room"  # larger than the limit, or nothing is left to evict
    FAILED = "failed"  # the disk is full, read-only or broken; writes pause for a minute


def is_transient(error: OSError) -> bool:
    """Returns whether an error is transient: a resource is short, and the file is not at fault."""
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN)


@dataclass(frozen=True)
class _Reservation:
    """Room for a file, held by a temporary file."""

    path: Path
    temporary: Path
    descriptor: int
    room: int


class Space:
    """Creates and removes the files of a root."""

    def __init__(
        self,
        root: Path,
        limits: Limits,
        clock: Callable[[], float],
        forget: Callable[[FoundBlock], None],
    ) -> None:
        """
        Args:
            clock: returns seconds since the epoch.
            forget: called with each evicted block, with the ledger locked.
        """
        self._root = root
        self._limits = limits
        self._clock = clock
        self._forget = forget
        self._ledger = Ledger(root)
        self._engine: EngineLock | None = None
        self._numbers = itertools.count()
        self._scanned = False
        self._closed = False
        self._paused_until = 0.0
        self._no_room_until = 0.0
        self._warned = False
        self._day_of_last_refusal = 0

    def start(self) -> None:
        """Scans the root, corrects the ledger, and evicts what exceeds the limit; never raises."""
        try:
            with self._locked():
                pass
        except OSError as error:
            self._pause(error)

    def close(self) -> None:
        """Rejects all later writes."""
        self._closed = True
        with suppress(OSError), self._ledger.locked():
            if self._engine is not None:
                self._engine.close()
                self._engine = None
        self._ledger.close()

    def store(
        self, path: Path, size: int, fill: Callable[[int], None], mtime_ns: int | None = None
    ) -> WriteResult:
        """Creates a file unless it exists.

        Args:
            path: below the root; missing folders are created.
            fill: writes `size` bytes to a file descriptor. Its exceptions other than OSError are
                raised.
            mtime_ns: nanoseconds since the epoch; None: now.
        """
        if self._closed or self.is_paused():
            return WriteResult.FAILED
        try:
            reserved = self._reserve(path, size)
        except OSError as error:
            self._pause(error)
            return WriteResult.FAILED
        if isinstance(reserved, WriteResult):
            return reserved
        try:
            return self._fill_and_rename(reserved, fill, mtime_ns)
        except OSError as error:
            self.remove(reserved.temporary)
            self._pause(error)
            return WriteResult.FAILED
        except BaseException:
            self.remove(reserved.temporary)
            raise

    def remove(self, path: Path, identity: tuple[int, int] | None = None) -> bool:
        """Removes a file, unless `identity` is another file's; returns whether it is gone."""
        try:
            with self._locked() as balance:
                eviction.remove_counted(self._ledger, balance, path, identity)
                return True
        except OSError:
            # Without the lock, the ledger is too high until the next scan.
            return eviction.remove(path)

    def today(self, balance: Balance) -> Balance:
        """Returns a balance for the current local day: bytes written on an earlier day become 0."""
        day = date.fromtimestamp(self._clock()).toordinal()
        # Accept one day back: an engine with a slightly different clock or time zone must not
        # start a new budget.
        return balance if day in (balance.day, balance.day - 1) else Balance(balance.bytes, day, 0)

    @contextmanager
    def _locked(self) -> Iterator[Balance]:
        """Holds the ledger's lock; yields the balance, correct after this process's first scan.

        Raises OSError if the ledger cannot be locked, or the root cannot be scanned.
        """
        if self._closed:
            raise OSError(errno.EBADF, "the cache is closed")
        with self._ledger.locked() as balance:
            if self._engine is not None and not self._engine.is_known():
                self._engine.close()  # its file was removed
                self._engine = None
            if self._engine is None:
                self._engine = EngineLock(self._root)
            if balance is None or not self._scanned:
                if balance is None:
                    balance = UNKNOWN
                    self._ledger.write_balance(balance)  # so that the ledger's own file is counted
                found = scan(self._root)
                balance = replace(balance, bytes=found.bytes)
                self._ledger.write_balance(balance)
                if balance.bytes > self._limits.max_bytes:
                    balance = self._evict(balance, found, room=0, keep=None)
                self._scanned = True
            yield balance

    def _reserve(self, path: Path, size: int) -> _Reservation | WriteResult:
        """Reserves room for a file, or returns why there is none."""
        room = layout.bytes_on_disk(size)
        with self._locked() as balance:
            if path.exists():
                return WriteResult.PRESENT
            balance = self.today(balance)
            budget = self._limits.daily_write_bytes
            if budget is not None and balance.written + room > budget:
                self._log_budget(balance.day, budget)
                return WriteResult.OVER_BUDGET
            if balance.bytes + room > self._limits.max_bytes:
                balance = self._make_room(balance, room, path)
                if balance.bytes + room > self._limits.max_bytes:
                    return WriteResult.NO_ROOM
            self._ledger.write_balance(replace(balance.plus(room), written=balance.written + room))
            try:
                return self._preallocate(path, size, room)
            except BaseException:
                self._ledger.write_balance(balance)
                raise

    def _make_room(self, balance: Balance, room: int, path: Path) -> Balance:
        """Evicts if that makes enough room for `path`; returns the new balance."""
        limit = self._limits.max_bytes
        now = self._clock()
        if room > limit or 0 < self._no_room_until - now <= _NO_ROOM_PAUSE:
            return balance
        found = scan(self._root)
        balance = replace(balance, bytes=found.bytes)
        self._ledger.write_balance(balance)
        if found.bytes + room <= limit:
            return balance
        if found.bytes - sum(block.room for block in found.blocks) + room > limit:
            self._no_room_until = now + _NO_ROOM_PAUSE
            return balance
        return self._evict(balance, found, room, path.relative_to(self._root).parts[0])

    def _evict(self, balance: Balance, found: RootFiles, room: int, keep: str | None) -> Balance:
        limit = self._limits.max_bytes
        allowed = min(limit - room, limit * _KEPT_OF_100 // 100)
        left = eviction.evict(self._root, found, allowed, self._forget, keep)
        balance = replace(balance, bytes=left)
        self._ledger.write_balance(balance)
        return balance

    def _preallocate(self, path: Path, size: int, room: int) -> _Reservation:
        assert self._engine is not None
        temporary = layout.temporary_path(path, self._engine.name, next(self._numbers))
        flags = os.O_RDWR | os.O_EXCL
        try:
            descriptor = layout.create_file(temporary, flags)
        except FileNotFoundError:
            layout.make_folder(self._root, path.parent)
            descriptor = layout.create_file(temporary, flags)
        try:
            os.ftruncate(descriptor, size)
        except BaseException:
            os.close(descriptor)
            eviction.remove(temporary)
            raise
        return _Reservation(path, temporary, descriptor, room)

    def _fill_and_rename(
        self, reserved: _Reservation, fill: Callable[[int], None], mtime_ns: int | None
    ) -> WriteResult:
        try:
            fill(reserved.descriptor)
            if mtime_ns is not None:
                os.utime(reserved.descriptor, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(reserved.descriptor)
        with self._locked() as balance:
            if reserved.path.exists():  # another engine was faster
                os.unlink(reserved.temporary)
                self._ledger.write_balance(balance.plus(-reserved.room))
                return WriteResult.PRESENT
            os.rename(reserved.temporary, reserved.path)
        self._warned = False
        return WriteResult.STORED

    def accepts_writes(self) -> bool:
        """Returns whether a file could be stored now, as far as known; does not block."""
        today = date.fromtimestamp(self._clock()).toordinal()
        return not (self._closed or self.is_paused() or self._day_of_last_refusal == today)

    def is_paused(self) -> bool:
        """Returns whether writes pause after a failure."""
        return 0 < self._paused_until - self._clock() <= _PAUSE

    def _pause(self, error: OSError) -> None:
        self._paused_until = self._clock() + _PAUSE
        if not self._warned and not self._closed:
            self._warned = True
            advice = _ADVICE.get(error.errno or 0, "It is tried again every minute.")
            reason = error.strerror or str(error)
            logger.warning(
                "The prefix cache in %s has stopped storing blocks: %s. %s Its existing "
                "blocks are still read.", self._root, reason, advice
            )  # fmt: skip

    def _log_budget(self, day: int, budget: int) -> None:
        if day != self._day_of_last_refusal:
            self._day_of_last_refusal = day
            logger.info(
                "The prefix cache in %s has reached its limit of %.3g GB written per day "
                "(prefix_cache_daily_writes) and stores no blocks until tomorrow. Its "
                "existing blocks are still read.",
                self._root,
                budget / 1e9,
            )
