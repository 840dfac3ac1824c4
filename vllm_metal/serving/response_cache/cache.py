# SPDX-License-Identifier: Apache-2.0
"""ResponseCache: kept answers by key, whatever becomes of the store."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from vllm.logger import init_logger

from vllm_metal.serving.config import ResponseCacheConfig
from vllm_metal.serving.figures import Figures
from vllm_metal.serving.response_cache.entry import Entry
from vllm_metal.serving.response_cache.store import Store, StoreError
from vllm_metal.serving.response_cache.twins import Twins

logger = init_logger(__name__)

_LEAVE_ALONE_S = 1.0  # a store that failed is not asked for so long, so that requests do not wait
_T = TypeVar("_T")


def open_store(config: ResponseCacheConfig) -> Store:
    """The store that a configuration names."""
    if config.redis is not None:  # the package may not be installed where none is named
        from vllm_metal.serving.response_cache.redis_store import RedisStore

        return RedisStore(config.redis, config.max_bytes, config.ttl_s)
    from vllm_metal.serving.response_cache.sqlite_store import SqliteStore

    assert config.path is not None  # one of the two is given
    return SqliteStore(config.path, config.max_bytes, config.ttl_s)


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
            secret: that binds an answer to its key; b"" where there are no tenants, which leaves a
                checksum.
            figures: that count.
            clock: seconds.
        """
        self._store, self._secret, self._figures = store, secret, figures
        self._clock = clock
        self._failed = False
        self._ask_at = 0.0
        self.twins = Twins()

    async def get(self, key: str) -> Entry | None:
        """The answer of a key; None: there is none, or nobody can say."""
        sealed = await self._asked(lambda: self._store.get(key))
        return None if sealed is None else Entry.unseal(sealed, self._secret, key)

    async def keep(self, key: str, entry: Entry) -> None:
        """Keeps a complete answer."""
        await self._asked(lambda: self._store.put(key, entry.seal(self._secret, key)))
        await self.count_bytes()

    async def count_bytes(self) -> None:
        """Brings the metric up to date."""
        total = await self._asked(self._store.num_bytes)
        if total is not None:
            self._figures.kept_bytes.set(total)

    def count(self, result: str) -> None:
        """Counts a request: "hit", "miss" or "bypass"."""
        self._figures.kept_answers.labels(result=result).inc()

    async def close(self) -> None:
        """Ends the store."""
        await self._store.close()

    async def _asked(self, question: Callable[[], Awaitable[_T]]) -> _T | None:
        if self._failed and self._clock() < self._ask_at:
            return None
        try:
            found = await question()
        except StoreError as error:
            if not self._failed:
                logger.warning(
                    "The response cache cannot be used (%s): every request is a miss until it can.",
                    error,
                )
            self._failed, self._ask_at = True, self._clock() + _LEAVE_ALONE_S
            return None
        if self._failed:
            logger.info("The response cache can be used again.")
        self._failed = False
        return found
