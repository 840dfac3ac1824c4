# SPDX-License-Identifier: Apache-2.0
"""Answers in a SQLite file, which a server's death at any time leaves whole.

It is in WAL mode with synchronous=NORMAL: after a crash of the process every commit is there, after
one of the machine the last ones may be missing, and the file is never damaged
(sqlite.org/pragma.html#pragma_synchronous). Several servers may share the folder.
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

from vllm.logger import init_logger

from vllm_metal.serving.response_cache.store import StoreError

logger = init_logger(__name__)

FILE = "answers.sqlite3"
#: What a row takes beside its value: the key, the numbers, and its place in the indices; measured
#: with sqlite3_analyzer's page counts at about 250.
ROW_BYTES = 256
_BUSY_S = 0.25  # that another server's write may take
_TOUCH_S = 60.0  # a hit is written down so often, else every one would write
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY, value BLOB NOT NULL, size INTEGER NOT NULL,
    expires REAL NOT NULL, used REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_expiry ON answers (expires);
CREATE INDEX IF NOT EXISTS by_use ON answers (used, size);
CREATE TABLE IF NOT EXISTS total (size INTEGER NOT NULL);
INSERT INTO total SELECT 0 WHERE NOT EXISTS (SELECT * FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON answers
    BEGIN UPDATE total SET size = size + NEW.size; END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON answers
    BEGIN UPDATE total SET size = size - OLD.size; END;
"""
_T = TypeVar("_T")


class SqliteStore:
    """A store in a folder. SQLite works in a thread of its own, one call at a time."""

    def __init__(
        self, folder: Path, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """Opens the file when it is first needed.

        Args:
            folder: made where there is none, for its owner alone.
            max_bytes: of all rows.
            ttl_s: seconds that an answer is kept.
            clock: seconds since 1970.
        """
        self._folder, self._max_bytes, self._ttl_s = folder, max_bytes, ttl_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "response-cache")
        self._opened: sqlite3.Connection | None = None

    async def get(self, key: str) -> bytes | None:
        return await self._in_thread(lambda: self._get(key))

    async def put(self, key: str, value: bytes) -> None:
        await self._in_thread(lambda: self._put(key, value))

    async def num_bytes(self) -> int:
        return await self._in_thread(self._total)

    async def close(self) -> None:
        if self._opened is not None:
            with contextlib.suppress(StoreError):
                await self._in_thread(self._opened.close)
        self._thread.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        def run() -> _T:
            try:
                return work()
            except (sqlite3.Error, OSError) as error:
                raise StoreError(f"{self._folder / FILE}: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)

    def _get(self, key: str) -> bytes | None:
        now, database = self._clock(), self._database()
        row = database.execute(
            "SELECT value, used FROM answers WHERE key = ? AND expires > ?", (key, now)
        ).fetchone()
        if row is None:
            return None
        if now - row[1] >= _TOUCH_S:
            with contextlib.suppress(sqlite3.OperationalError):  # a full disk: it can still read
                database.execute("UPDATE answers SET used = ? WHERE key = ?", (now, key))
        return bytes(row[0])

    def _put(self, key: str, value: bytes) -> None:
        now, database = self._clock(), self._database()
        size = len(value) + ROW_BYTES
        if size > self._max_bytes:
            return
        database.execute("BEGIN IMMEDIATE")
        try:
            # Not REPLACE, whose removal of the older row runs no trigger.
            database.execute("DELETE FROM answers WHERE key = ? OR expires <= ?", (key, now))
            excess = self._total() + size - self._max_bytes
            if excess > 0:
                self._evict(excess)
            database.execute(
                "INSERT INTO answers VALUES (?, ?, ?, ?, ?)",
                (key, value, size, now + self._ttl_s, now),
            )
            database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                database.execute("ROLLBACK")
            raise

    def _evict(self, excess: int) -> None:
        database, gone = self._database(), []
        for key, size in database.execute("SELECT key, size FROM answers ORDER BY used"):
            gone.append((key,))
            excess -= size
            if excess <= 0:
                break
        database.executemany("DELETE FROM answers WHERE key = ?", gone)

    def _total(self) -> int:
        return int(self._database().execute("SELECT size FROM total").fetchone()[0])

    def _database(self) -> sqlite3.Connection:
        if self._opened is None:
            try:
                self._opened = self._open()
            except sqlite3.OperationalError:  # busy, or a disk that is full or read-only
                raise
            except sqlite3.DatabaseError as error:
                logger.warning(
                    "%s is damaged (%s): it is made anew, without its answers",
                    self._folder / FILE,
                    error,
                )
                for suffix in ("", "-wal", "-shm"):
                    (self._folder / f"{FILE}{suffix}").unlink(missing_ok=True)
                self._opened = self._open()
        return self._opened

    def _open(self) -> sqlite3.Connection:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / FILE
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite's other files get its mode
        database = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.executescript(_SCHEMA)
        except BaseException:
            database.close()
            raise
        return database
