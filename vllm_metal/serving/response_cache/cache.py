# SPDX-License-Identifier: Apache-2.0
"""Response cache: looks up and stores responses by key, and joins equal requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from vllm.logger import init_logger

from vllm_metal.serving.metrics import Figures
from vllm_metal.serving.response_cache.entry import Entry
from vllm_metal.serving.response_cache.store import Store, StoreError

logger = init_logger(__name__)

_LEAVE_ALONE_S = 1.0  # a store that failed is not asked for so long, so that requests do not wait
_T = TypeVar("_T")


class NotKept(Exception):
    """The first one's answer may not be given to others: an error, or one that was cut off."""


class Abandoned(Exception):
    """The first one went away before its answer was whole: one of the others asks instead."""


class Coalesced:
    """Requests of one key at one time: the first asks, the others wait for its answer.

    It belongs to one event loop.
    """

    def __init__(self) -> None:
        self._asked: dict[str, asyncio.Future[Entry]] = {}

    def join(self, key: str) -> asyncio.Future[Entry] | None:
        """The answer that somebody has asked for; it may end with NotKept or Abandoned.

        Returns:
            None: nobody has. The caller calls `lead`, and asks.
        """
        return self._asked.get(key)

    def lead(self, key: str) -> Lead:
        """Has others wait for what the caller asks for, until it says `end`, whatever happens."""
        self._asked[key] = asyncio.get_running_loop().create_future()
        return Lead(self._asked, key)


class Lead:
    """The first request of a key."""

    def __init__(self, asked: dict[str, asyncio.Future[Entry]], key: str) -> None:
        self._asked, self._key, self._future = asked, key, asked[key]

    def end(self, outcome: Entry | Exception) -> None:
        """Gives the outcome to all who wait; nothing the second time."""
        if self._future.done():
            return
        del self._asked[self._key]
        if isinstance(outcome, Entry):
            self._future.set_result(outcome)
        else:
            self._future.set_exception(outcome)
            self._future.exception()  # nobody may be waiting, which is no mistake


class ResponseCache:
    """Kept answers. A store that fails has none, and keeps none; that is said once."""

    def __init__(
        self,
        store: Store,
        secret: bytes,
        figures: Figures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Asks nothing yet.

        Args:
            store: where they are.
            secret: that binds an answer to its key.
            figures: that count.
            clock: seconds.
        """
        self._store, self._secret, self._figures = store, secret, figures
        # A full disk and a full Redis server still say what they have.
        self._reading = _Access(
            "The response cache cannot be used (%s): every request is a miss until it can."
        )
        self._writing = _Access(
            "The response cache cannot store responses (%s): new ones are not cached until it can."
        )
        self._clock = clock
        self.coalesced = Coalesced()

    async def get(self, key: str, owner: str = "") -> Entry | None:
        """The answer of a key; None: there is none, or nobody can say.

        Args:
            key: of a request.
            owner: the tenant's name; "" where there are no tenants.
        """
        sealed = await self._asked(self._reading, lambda: self._store.get(key, owner))
        return None if sealed is None else Entry.unseal(sealed, self._secret, key)

    async def keep(self, key: str, entry: Entry, owner: str = "") -> None:
        """Keeps a complete answer; arguments as those of `get`."""
        if self._reading.is_left_alone(self._clock()):
            return
        sealed = entry.seal(self._secret, key)
        await self._asked(self._writing, lambda: self._store.put(key, sealed, owner))

    async def count_bytes(self) -> None:
        """Brings the metric up to date, which other servers and commands change, too."""
        total = await self._asked(self._reading, self._store.num_bytes)
        if total is not None:
            self._figures.kept_bytes.set(total)

    def count(self, result: str) -> None:
        """Counts a request: "hit", "miss" or "bypass"."""
        self._figures.kept_answers.labels(result).inc()

    async def close(self) -> None:
        """Ends the store."""
        await self._store.close()

    async def _asked(self, access: _Access, question: Callable[[], Awaitable[_T]]) -> _T | None:
        if access.is_left_alone(self._clock()):
            return None
        try:
            found = await question()
        except StoreError as error:
            access.failed(error, self._clock())
            return None
        access.worked()
        return found


class _Access:
    """One way to use a store, and whether it works."""

    def __init__(self, complaint: str) -> None:
        self._complaint = complaint
        self._ask_at: float | None = None  # None: it works

    def is_left_alone(self, now: float) -> bool:
        return self._ask_at is not None and now < self._ask_at

    def failed(self, error: StoreError, now: float) -> None:
        if self._ask_at is None:
            logger.warning(self._complaint, error)
        self._ask_at = now + _LEAVE_ALONE_S

    def worked(self) -> None:
        if self._ask_at is not None:
            logger.info("The response cache can be used again.")
        self._ask_at = None
