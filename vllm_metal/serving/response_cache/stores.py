# SPDX-License-Identifier: Apache-2.0
"""Opens the store and the secret that the settings of the response cache name."""

from __future__ import annotations

import asyncio
import secrets

from vllm_metal.serving.config import ResponseCacheConfig
from vllm_metal.serving.response_cache.store import Store, StoreError
from vllm_metal.settings import secret_file

SECRET_FILE = "secret"  # in the store's folder


def open_store(config: ResponseCacheConfig) -> Store:
    if config.redis is not None:  # imported here, as the package redis is optional
        from vllm_metal.serving.response_cache.redis_store import RedisStore

        return RedisStore(config.redis, config.max_bytes, config.ttl_s)
    from vllm_metal.serving.response_cache.sqlite_store import SqliteStore

    assert config.path is not None  # one of the two is given
    return SqliteStore(config.path, config.max_bytes, config.ttl_s)


def secret_of(config: ResponseCacheConfig) -> bytes:
    """Returns the secret to use without tenants: the configured one, or one created at first use.

    If it cannot be stored, returns a secret for this process only. Raises ValueError as
    `secret_file.read` does.
    """
    if config.secret is not None:
        return secret_file.read(config.secret, "[response_cache] secret")
    assert config.path is not None  # Redis without tenants requires `secret`
    try:
        return secret_file.read_or_make(config.path / SECRET_FILE, "[response_cache] path")
    except OSError as error:
        # Imported here to keep commands fast, which never get here.
        from vllm.logger import init_logger

        init_logger(__name__).warning(
            "%s cannot be created (%s): cached responses are lost when this server ends.",
            config.path / SECRET_FILE,
            error,
        )
        return secrets.token_bytes(32)


def purge(config: ResponseCacheConfig, owner: str | None = None) -> int:
    """Removes the cached responses of tenant `owner`, or all if None; returns their number.

    Safe while servers use the store. Raises OSError if the store is unavailable.
    """

    async def run() -> int:
        store = open_store(config)
        try:
            return await store.purge(owner)
        except StoreError as error:
            raise OSError(f"cached responses cannot be deleted: {error}") from error
        finally:
            await store.close()

    return asyncio.run(run())
