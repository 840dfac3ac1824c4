# SPDX-License-Identifier: Apache-2.0
"""Response cache: looks up and stores responses by key, and joins equal requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from vllm.logger import init_logger

from vllm_metal.serving.metrics import ServerMetrics
from vllm_metal.serving.response_cache.entry import Entry
from vllm_metal.serving.response_cache.store import Store, StoreError

logger = init_logger(__name__)

_BACKOFF_S = 1.0  # a failed store is not tried for this time, so that requests do not wait for it
_T = TypeVar("_T")


class NotCacheable(Exception):
    """The response to the first of equal requests cannot be shared: it is an error, or cut off."""


class Abandoned(Exception):
    """The first client left before its response was complete; another request must be sent."""


class Coalesced:
    """Joins equal requests in flight: the first leads, the others wait for its response.

    Belongs to one event loop.
    """

    def __init__(self) -> None:
        self._in_flight: dict[str, asyncio.Future[Entry]] = {}

    def join(self, key: str) -> asyncio.Future[Entry] | None:
        """Returns the future response to an equal request; it may raise NotCacheable or Abandoned.

        Returns None if there is no such request: the caller must then call `lead`.
        """
        return self._in_flight.get(key)

    def lead(self, key: str) -> Lead:
        """Makes later equal requests wait until the caller calls the result's `end`, as it must."""
        self._in_flight[key] = asyncio.get_running_loop().create_future()
        return Lead(self._in_flight, key)


class Lead:
    """Handle of the first of equal requests, for whose response the others wait."""

    def __init__(self, in_flight: dict[str, asyncio.Future[Entry]], key: str) -> None:
        self._in_flight, self._key, self._future = in_flight, key, in_flight[key]

    def end(self, outcome: Entry | Exception) -> None:
        """Passes the outcome to all waiting requests; a second call does nothing."""
        if self._future.done():
            return
        del self._in_flight[self._key]
        if isinstance(outcome, Entry):
            self._future.set_result(outcome)
        else:
            self._future.set_exception(outcome)
            self._future.exception()  # retrieved, as asyncio logs an error if nobody does


class ResponseCache:
    """Cached responses. A failing store is treated as empty, and logged once."""

    def __init__(
        self,
        store: Store,
        secret: bytes,
        metrics: ServerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`secret`: signs each response together with its key; `clock` returns seconds."""
        self._store, self._secret, self._metrics = store, secret, metrics
        # Separate states: a full disk or a full Redis server can still be read.
        self._reading = _Access(
            "The response cache cannot be used (%s): every request is a miss until it can."
        )
        self._writing = _Access(
            "The response cache cannot store responses (%s): new ones are not cached until it can."
        )
        self._clock = clock
        self.coalesced = Coalesced()

    async def get(self, key: str, owner: str = "") -> Entry | None:
        """Returns the response of a key; None if there is none, or the store fails.

        `owner` is the tenant's name, "" without tenants.
        """
        sealed = await self._call(self._reading, lambda: self._store.get(key, owner))
        return None if sealed is None else Entry.unseal(sealed, self._secret, key)

    async def keep(self, key: str, entry: Entry, owner: str = "") -> None:
        """Stores a complete response; arguments as in `get`."""
        if self._reading.is_backing_off(self._clock()):
            return
        sealed = entry.seal(self._secret, key)
        await self._call(self._writing, lambda: self._store.put(key, sealed, owner))

    async def count_bytes(self) -> None:
        """Updates the size metric, because other servers and commands change the store, too."""
        total = await self._call(self._reading, self._store.num_bytes)
        if total is not None:
            self._metrics.cache_bytes.set(total)

    def count(self, result: str) -> None:
        """Counts a request: "hit", "miss" or "bypass"."""
        self._metrics.cache_requests.labels(result).inc()

    async def close(self) -> None:
        await self._store.close()

    async def _call(self, access: _Access, operation: Callable[[], Awaitable[_T]]) -> _T | None:
        if access.is_backing_off(self._clock()):
            return None
        try:
            found = await operation()
        except StoreError as error:
            access.failed(error, self._clock())
            return None
        access.worked()
        return found


class _Access:
    """Tracks whether reading (or writing) a store works, and when to retry it."""

    def __init__(self, complaint: str) -> None:
        self._complaint = complaint
        self._retry_at: float | None = None  # None: it works

    def is_backing_off(self, now: float) -> bool:
        return self._retry_at is not None and now < self._retry_at

    def failed(self, error: StoreError, now: float) -> None:
        if self._retry_at is None:
            logger.warning(self._complaint, error)
        self._retry_at = now + _BACKOFF_S

    def worked(self) -> None:
        if self._retry_at is not None:
            logger.info("The response cache can be used again.")
        self._retry_at = None
