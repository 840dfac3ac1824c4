# SPDX-License-Identifier: Apache-2.0
"""The stores that settings name, for a server and for a command."""

from __future__ import annotations

import asyncio

from vllm_metal.serving.config import ResponseCacheConfig
from vllm_metal.serving.response_cache.store import Store, StoreError


def open_store(config: ResponseCacheConfig) -> Store:
    """The store that a configuration names."""
    if config.redis is not None:  # the package may not be installed where none is named
        from vllm_metal.serving.response_cache.redis_store import RedisStore

        return RedisStore(config.redis, config.max_bytes, config.ttl_s)
    from vllm_metal.serving.response_cache.sqlite_store import SqliteStore

    assert config.path is not None  # one of the two is given
    return SqliteStore(config.path, config.max_bytes, config.ttl_s)


def purge(config: ResponseCacheConfig, owner: str | None = None) -> int:
    """Removes kept answers, while servers use the store; returns how many.

    Args:
        config: names the store.
        owner: a tenant; None: removes all.

    Raises:
        OSError: the store cannot be asked.
    """

    async def run() -> int:
        store = open_store(config)
        try:
            return await store.purge(owner)
        except StoreError as error:
            raise OSError(f"kept answers cannot be removed: {error}") from error
        finally:
            await store.close()

    return asyncio.run(run())
