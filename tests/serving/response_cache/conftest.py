# SPDX-License-Identifier: Apache-2.0
"""Stores of all kinds, and a real Redis server."""

import pytest
from redis_server import NO_REDIS, REDIS, held_port, redis_server

from vllm_metal.serving.response_cache import redis_store, sqlite_store
from vllm_metal.serving.response_cache.redis_store import RedisStore
from vllm_metal.serving.response_cache.sqlite_store import SqliteStore


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    pytest.importorskip("redis", reason="the extra `redis` is not installed")
    if REDIS is None:
        pytest.skip(NO_REDIS)
    with held_port() as port, redis_server(port, tmp_path_factory.mktemp("redis")):
        yield f"redis://127.0.0.1:{port}/0"


@pytest.fixture
def patient(monkeypatch):
    """Treats no delay of another server's write or of Redis as an outage."""
    monkeypatch.setattr(sqlite_store, "BUSY_S", 60.0)
    monkeypatch.setattr(redis_store, "WAIT_S", 60.0)
    monkeypatch.setattr(redis_store, "CONNECT_S", 60.0)


@pytest.fixture(params=["sqlite", "redis"])
def make(request, tmp_path):
    """Opens the same store repeatedly, with maximum bytes, a lifetime and a clock."""
    if request.param == "sqlite":
        return lambda *given: SqliteStore(tmp_path, *given)
    url = request.getfixturevalue("redis_url")
    import redis

    redis.from_url(url).flushall()
    return lambda *given: RedisStore(url, *given)
