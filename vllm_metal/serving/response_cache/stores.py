# SPDX-License-Identifier: Apache-2.0
"""What settings say of kept answers: the store, for a server and a command, and its secret."""

from __future__ import annotations

import asyncio
import secrets

from vllm_metal.serving.config import ResponseCacheConfig
from vllm_metal.serving.response_cache.store import Store, StoreError
from vllm_metal.settings import secret_file

SECRET_FILE = "secret"  # in the folder of the answers


def open_store(config: ResponseCacheConfig) -> Store:
    """The store that a configuration names."""
    if config.redis is not None:  # the package may not be installed where none is named
        from vllm_metal.serving.response_cache.redis_store import RedisStore

        return RedisStore(config.redis, config.max_bytes, config.ttl_s)
    from vllm_metal.serving.response_cache.sqlite_store import SqliteStore

    assert config.path is not None  # one of the two is given
    return SqliteStore(config.path, config.max_bytes, config.ttl_s)


def secret_of(config: ResponseCacheConfig) -> bytes:
    """The secret where there are no tenants: that of the settings, or one made at the first start.

    Where none can be made, answers are kept under one that ends with this process.

    Raises:
        ValueError: as `secret_file.read`.
    """
    if config.secret is not None:
        return secret_file.read(config.secret, "[response_cache] secret")
    assert config.path is not None  # with Redis, the settings have to name one
    try:
        return secret_file.read_or_make(config.path / SECRET_FILE, "[response_cache] path")
    except OSError as error:
        # Imported here so that a command, which never comes here, answers at once.
        from vllm.logger import init_logger

        init_logger(__name__).warning(
            "%s cannot be created (%s): cached responses are lost when this server ends.",
            config.path / SECRET_FILE,
            error,
        )
        return secrets.token_bytes(32)


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
            raise OSError(f"cached responses cannot be deleted: {error}") from error
        finally:
            await store.close()

    return asyncio.run(run())
