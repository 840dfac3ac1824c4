# SPDX-License-Identifier: Apache-2.0
"""Behavior specific to the Redis store, and its failures."""

import asyncio
import contextlib
import errno
import os
import signal
import sys

import pytest
from redis_server import NO_REDIS, REDIS, held_port, redis_server
from response_stores import key, play

from vllm_metal.serving.response_cache.redis_store import RedisStore
from vllm_metal.serving.response_cache.store import StoreError


@pytest.mark.skipif(REDIS is None, reason=NO_REDIS)
def test_what_redis_has_in_no_index_is_purged_too(redis_url):
    import redis

    other = redis.from_url(redis_url)
    other.flushall()
    other.set("somebody else's", "value")

    async def scenario(store):
        for number in range(6):
            await store.put(key(number), b"one", "ab"[number % 2])
        other.delete("{vllm-metal}:answers-index")
        assert await store.purge("a") == 3
        assert [await store.get(key(n), "ab"[n % 2]) for n in range(6)] == [None, b"one"] * 3
        assert await store.purge() == 3 and await store.num_bytes() == 0

    play(lambda *given: RedisStore(redis_url, *given), scenario)
    assert set(other.keys()) == {b"{vllm-metal}:answers-total", b"somebody else's"}
    other.close()


@pytest.mark.skipif(REDIS is None, reason=NO_REDIS)
def test_redis_removes_what_is_too_old_by_itself(redis_url):
    import redis

    with redis.from_url(redis_url) as other:
        other.flushall()
        play(lambda *given: RedisStore(redis_url, *given), lambda store: store.put(key(1), b"one"))
        (place,) = other.keys(f"*{key(1)}")
        assert 0 < other.pttl(place) <= 1_000_000


def test_redis_that_is_not_there_is_an_outage_at_once():
    pytest.importorskip("redis", reason="the extra `redis` is not installed")

    async def scenario(store):
        for question in (store.get(key(1)), store.put(key(1), b"one"), store.num_bytes()):
            with pytest.raises(StoreError) as error:
                await question
            assert "s3cr3t" not in str(error.value)

    with held_port() as port:  # nobody listens
        url = f"redis://:s3cr3t@127.0.0.1:{port}/0"
        play(lambda *given: RedisStore(url, *given), scenario)


async def found(store):
    """Returns the response; None if the server does not answer in time."""
    with contextlib.suppress(StoreError):
        return await store.get(key(1))


@pytest.mark.skipif(REDIS is None, reason=NO_REDIS)
def test_redis_that_hangs_is_an_outage(redis_url, tmp_path):
    with held_port() as port, redis_server(port, tmp_path) as process:

        async def scenario(store):
            await store.put(key(1), b"one")
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(StoreError):
                await asyncio.wait_for(store.get(key(1)), 60)
            os.kill(process.pid, signal.SIGCONT)
            async with asyncio.timeout(60):
                while await found(store) != b"one":
                    await asyncio.sleep(0.01)

        play(lambda *given: RedisStore(f"redis://127.0.0.1:{port}/0", *given), scenario)


@pytest.mark.skipif(REDIS is None, reason=NO_REDIS)
def test_hundreds_at_once_wait_for_a_connection(redis_url):
    async def scenario(store):
        await store.put(key(1), b"one")
        found = await asyncio.gather(*(store.get(key(1)) for _ in range(500)))
        assert found == [b"one"] * 500

    play(lambda *given: RedisStore(redis_url, *given), scenario)


PLANTED = {
    "a word for the total": lambda redis: redis.set("{vllm-metal}:answers-total", "abc"),
    "a total below zero": lambda redis: redis.set("{vllm-metal}:answers-total", -5),
    "a total beyond all": lambda redis: redis.set("{vllm-metal}:answers-total", 10**14),
    "a total of too many digits": lambda redis: redis.set("{vllm-metal}:answers-total", 10**30),
    "a size of too many digits": lambda redis: redis.zadd(
        "{vllm-metal}:answers-index", {f"{key(1)}:{10**30}:": 1}
    ),
    "a list for the total": lambda redis: other_list(redis, "{vllm-metal}:answers-total"),
    "a list for the index": lambda redis: other_list(redis, "{vllm-metal}:answers-index"),
    "a list for an answer": lambda redis: other_list(redis, "{vllm-metal}:answers:" + key(1)),
    "a member that is none": lambda redis: redis.zadd("{vllm-metal}:answers-index", {"x": 1}),
}


def other_list(redis, name):
    redis.delete(name)
    redis.lpush(name, "x")


@pytest.mark.skipif(REDIS is None, reason=NO_REDIS)
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", PLANTED)
def test_what_others_put_into_redis_heals(redis_url, name, before):
    import redis

    other = redis.from_url(redis_url)
    other.flushall()

    async def scenario(store):
        if before:
            PLANTED[name](other)
        for number in range(3):
            await store.put(key(number), bytes(1000))
        if not before:
            PLANTED[name](other)
        assert await store.num_bytes() >= 0
        assert await store.get(key(1)) in (None, bytes(1000))
        for number in range(40):
            await store.put(key(number % 20), bytes(1000))
        assert await store.get(key(19)) == bytes(1000)
        assert 10_000 <= await store.num_bytes() <= 20_000
        assert await store.purge() > 0 and await store.num_bytes() == 0

    play(lambda *given: RedisStore(redis_url, *given), scenario, max_bytes=16_000)
    other.close()


@pytest.mark.parametrize(("system", "told"), [("darwin", True), ("linux", False)])
def test_a_redis_that_macos_keeps_away_is_told(monkeypatch, system, told):
    pytest.importorskip("redis", reason="the extra `redis` is not installed")

    async def denied(**place):
        raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))

    async def ask():
        store = RedisStore("redis://:s3cr3t@192.0.2.1/0", 10**6, 1000.0)
        try:
            await store.get(key(1))
        finally:
            await store.close()

    monkeypatch.setattr(asyncio, "open_connection", denied)
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(StoreError, match=r"^Redis: ConnectionError") as raised:
        asyncio.run(ask())
    assert ("Privacy & Security > Local Network" in str(raised.value)) == told
    assert "s3cr3t" not in str(raised.value)
