# SPDX-License-Identifier: Apache-2.0
"""Stores cached responses in a SQLite file, which survives crashes.

In WAL mode with synchronous=NORMAL, a crash of the process loses no commit; a crash of the machine
may lose the last ones, but does not corrupt the file (sqlite.org/pragma.html#pragma_synchronous).
If the file is damaged or removed otherwise, it is created anew. Several servers may share a folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from vllm_metal.serving.response_cache.store import StoreError

FILE = "answers.sqlite3"
BUSY_S = 0.25  # wait for another server's write
_RETRY_S = 0.005
_TOUCH_S = 60.0  # a row's last use is updated at most this often, as each update is a write
#: Version of the schema below; a file with another version is created anew.
_VERSION = 2
_WAL_PAGES = 256  # pages in the write-ahead log before a checkpoint: 1 MB
_SPARE_PAGES = 4  # pages that a row may add to the indices
#: Bytes of a row without its value: key, numbers, and entries in three indices.
_ROW_BYTES = 200
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS answers (
        key BLOB NOT NULL, value BLOB NOT NULL, owner TEXT NOT NULL,
        expires REAL NOT NULL, used REAL NOT NULL)""",
    "CREATE UNIQUE INDEX IF NOT EXISTS by_key ON answers (key)",
    "CREATE INDEX IF NOT EXISTS by_expiry ON answers (expires)",
    "CREATE INDEX IF NOT EXISTS by_use ON answers (used)",
)
_BEGIN = "BEGIN IMMEDIATE"
_T = TypeVar("_T")


class SqliteStore:
    """A store in a folder. SQLite runs in its own thread, one call at a time."""

    def __init__(
        self, folder: Path, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Opens the file on first use; creates `folder`, for its owner only, if it is missing.

        `max_bytes` limits the pages in use; `clock` returns seconds since 1970.
        """
        self._folder, self._max_bytes, self._ttl_s = folder, max_bytes, ttl_s
        self._path = folder / FILE
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "response-cache")
        self._opened: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None  # identity of the open file

    async def get(self, key: str, owner: str = "") -> bytes | None:
        return await self._in_thread(lambda: self._get(bytes.fromhex(key), owner))

    async def put(self, key: str, value: bytes, owner: str = "") -> None:
        await self._in_thread(lambda: self._put(bytes.fromhex(key), value, owner))

    async def purge(self, owner: str | None = None) -> int:
        return await self._in_thread(lambda: self._purge(owner))

    async def num_bytes(self) -> int:
        return await self._in_thread(self._num_bytes)

    async def close(self) -> None:
        with contextlib.suppress(StoreError):
            await self._in_thread(self._close)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        def run() -> _T:
            try:
                try:
                    return work()
                except sqlite3.DatabaseError as error:
                    if not _is_damage(error):
                        raise
                    self._recreate(error)
                    return work()
            except (sqlite3.Error, OSError) as error:
                raise StoreError(f"{self._path}: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _get(self, key: bytes, owner: str) -> bytes | None:
        now, database = self._clock(), self._database()
        row = database.execute(
            "SELECT value, used FROM answers WHERE key = ? AND owner = ? AND expires > ?",
            (key, owner, now),
        ).fetchone()
        if row is None:
            return None
        value, used = row
        if not isinstance(value, bytes) or not isinstance(used, float):
            raise sqlite3.DatabaseError("a row has other types than were written")
        if now - used >= _TOUCH_S:
            with contextlib.suppress(sqlite3.OperationalError):  # reads work on a full disk
                database.execute("UPDATE answers SET used = ? WHERE key = ?", (now, key))
        return value

    def _put(self, key: bytes, value: bytes, owner: str) -> None:
        now, database = self._clock(), self._database()
        page = self._page_bytes()
        size = _whole_pages(len(value) + _ROW_BYTES, page) + _SPARE_PAGES * page
        if size > self._max_bytes:
            return
        with database:  # one transaction
            database.execute(_BEGIN)
            # Not REPLACE: if a damaged index misses a row here, the INSERT below fails.
            database.execute("DELETE FROM answers WHERE key = ? OR expires <= ?", (key, now))
            self._make_room(size)
            database.execute(
                "INSERT INTO answers VALUES (?, ?, ?, ?, ?)",
                (key, value, owner, now + self._ttl_s, now),
            )

    def _purge(self, owner: str | None) -> int:
        # A file created by a command would belong to its user, not to the server's.
        if not self._path.exists():
            return 0
        database = self._database()
        with database:
            database.execute(_BEGIN)
            if owner is None:
                removed = database.execute("DELETE FROM answers").rowcount
            else:
                removed = database.execute("DELETE FROM answers WHERE owner = ?", (owner,)).rowcount
        _shrink(database)
        return removed

    def _make_room(self, size: int) -> None:
        """Removes the least recently used rows until `size` bytes more fit."""
        # Checked repeatedly: a page becomes free only when all of its rows are gone.
        database = self._database()
        while (excess := self._num_bytes() + size - self._max_bytes) > 0:
            gone = []
            for rowid, length in database.execute(
                "SELECT rowid, length(value) FROM answers ORDER BY used"
            ):
                gone.append((rowid,))
                excess -= length + _ROW_BYTES
                if excess <= 0:
                    break
            if not gone:
                return
            database.executemany("DELETE FROM answers WHERE rowid = ?", gone)

    def _num_bytes(self) -> int:
        """Returns the bytes of the pages in use."""
        database = self._database()
        pages, free = (
            database.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count")
        )
        return int(pages - free) * self._page_bytes()

    def _page_bytes(self) -> int:
        return int(self._database().execute("PRAGMA page_size").fetchone()[0])

    def _database(self) -> sqlite3.Connection:
        """Returns the open file; reopens it if it was removed or replaced."""
        if self._opened is not None and self._file != _identity(self._path):
            self._close()
        if self._opened is None:
            self._opened = self._open()
            self._file = _identity(self._path)
        return self._opened

    def _open(self) -> sqlite3.Connection:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Created here, as SQLite's other files inherit its mode. An existing file is not opened:
        # closing it would release locks of this process's connections
        # (sqlite.org/howtocorrupt.html, 2.2).
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL, 0o600))
        database = sqlite3.connect(self._path, timeout=BUSY_S, isolation_level=None)
        try:
            _to_wal(database)
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
            database.execute(f"PRAGMA journal_size_limit = {_WAL_PAGES * 4096}")
            with database:
                database.execute(_BEGIN)  # another server may create the tables at the same time
                (version,) = database.execute("PRAGMA user_version").fetchone()
                (tables,) = database.execute("SELECT count(*) FROM sqlite_master").fetchone()
                if tables and version != _VERSION:
                    raise sqlite3.DatabaseError(f"its tables are of version {version}")
                for statement in _SCHEMA:
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {_VERSION}")
            if self._path.stat().st_size > self._max_bytes:
                _shrink(database)  # max_bytes was larger before
        except BaseException:
            database.close()
            raise
        return database

    def _recreate(self, error: sqlite3.DatabaseError) -> None:
        """Removes the damaged file, unless another server has done so."""
        opened = self._file if self._opened is not None else _identity(self._path)
        self._close()
        if opened is None or opened != _identity(self._path):
            return
        # Imported here to keep commands fast, which rarely get here.
        from vllm.logger import init_logger

        init_logger(__name__).warning(
            "%s is corrupt (%s): creating it anew, without its cached responses", self._path, error
        )
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(f"{FILE}{suffix}").unlink(missing_ok=True)

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            with contextlib.suppress(sqlite3.Error):
                opened.close()


def _to_wal(database: sqlite3.Connection) -> None:
    # SQLite does not wait for another server that does the same: its busy handler is not called
    # where two connections could deadlock.
    end = time.monotonic() + BUSY_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
        time.sleep(_RETRY_S)


def _shrink(database: sqlite3.Connection) -> None:
    """Returns free pages to the disk, unless another server writes or the disk is full."""
    with contextlib.suppress(sqlite3.OperationalError):
        database.execute("VACUUM")
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    # A new file does not help if the disk is full or another server writes.
    if isinstance(error, sqlite3.ProgrammingError | sqlite3.NotSupportedError):
        return False
    if not isinstance(error, sqlite3.OperationalError):
        return True
    return getattr(error, "sqlite_errorname", "") == "SQLITE_IOERR_SHORT_READ"


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _whole_pages(size: int, page: int) -> int:
    """Rounds the size of a row up to whole pages; small rows share a page."""
    return size if size < page // 4 else -(-size // page) * page
