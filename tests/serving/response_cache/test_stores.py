# SPDX-License-Identifier: Apache-2.0
"""Behavior of every store, in SQLite and in a real Redis server."""

import asyncio
import random

import pytest
from response_stores import EMPTY, key, play

from vllm_metal.serving.response_cache import redis_store


def test_what_is_kept_is_there_also_for_another_server(make):
    async def keep(store):
        assert await store.get(key(1)) is None
        await store.put(key(1), b"one\0")
        await store.put(key(2), b"two")
        await store.put(key(1), b"again")

    async def look(store):
        assert [await store.get(key(n)) for n in (1, 2, 3)] == [b"again", b"two", None]
        assert await store.num_bytes() in (8, EMPTY)

    play(make, keep)
    play(make, look)


def test_an_answer_is_kept_for_its_time(make):
    now = [1e9]

    async def scenario(store):
        await store.put(key(1), b"one")
        now[0] += 999.0
        assert await store.get(key(1)) == b"one"
        now[0] += 2.0
        await store.put(key(2), b"two")  # which clears up
        assert [await store.get(key(n)) for n in (1, 2)] == [None, b"two"]
        assert await store.num_bytes() in (3, EMPTY)

    play(make, scenario, clock=lambda: now[0])


def test_bytes_are_bounded(make):
    async def scenario(store):
        rng, most = random.Random(1), 0
        for number in range(200):
            await store.put(key(number % 50), bytes(rng.randrange(1, 3000)))
            most = max(most, await store.num_bytes())
        await store.put(key(99), bytes(120_001))  # longer than all there may be
        assert await store.get(key(99)) is None
        held = [n for n in range(50) if await store.get(key(n)) is not None]
        assert most <= 120_000 and len(held) > 8
        return most

    assert play(make, scenario, max_bytes=120_000) > 80_000


def test_the_oldest_make_room(make):
    async def scenario(store):
        for number in range(8):
            await store.put(key(number), bytes(20_000))
        return [await store.get(key(number)) is not None for number in range(8)]

    ticks = iter(range(10**9, 10**9 + 10**6))
    most = EMPTY + 9 * 4096 + 5 * 20_480
    kept = play(make, scenario, max_bytes=most, clock=lambda: float(next(ticks)))
    assert kept == sorted(kept) and kept.count(True) in (5, 6, 7)


@pytest.mark.parametrize("each", [150, pytest.param(1000, marks=pytest.mark.more)])
def test_an_owner_may_be_purged_and_all_may(make, monkeypatch, each):
    monkeypatch.setattr(redis_store, "BATCH", each)

    async def scenario(store):
        whose = ["a", "a.b", ""] * each

        async def gone():
            return [await store.get(key(n), whose[n]) is None for n in range(0, 3 * each, 37)]

        for number, owner in enumerate(whose):
            await store.put(key(number), b"x" * 1000, owner)
        full = await store.num_bytes()
        assert await store.purge("a") == each and await store.purge("b") == 0
        assert await gone() == [whose[n] == "a" for n in range(0, 3 * each, 37)]
        assert 0.6 * full < await store.num_bytes() < 0.75 * full
        assert await store.purge() == 2 * each
        assert all(await gone()) and await store.num_bytes() in (0, EMPTY)
        await store.put(key(1), b"again", "a")
        assert await store.get(key(1), "a") == b"again"
        assert await store.get(key(1), "b") is None

    play(make, scenario, max_bytes=10**8)


def test_another_process_may_purge_what_a_server_uses(make, patient):
    """Like the command, it has its own store; answers arrive meanwhile."""

    async def scenario(store):
        other = make(10**6, 1000.0)
        for number in range(100):
            await store.put(key(number), b"x" * 1000, "a")
        coming = [store.put(key(n), b"x" * 1000, "b") for n in range(100, 200)]
        removed, *_ = await asyncio.gather(other.purge("a"), *coming)
        assert removed == 100
        assert [await store.get(key(n), "a") for n in range(100)] == [None] * 100
        assert [await store.get(key(n), "b") for n in range(100, 200)] == [b"x" * 1000] * 100
        assert await store.num_bytes() == await other.num_bytes() < 200_000
        await other.close()

    play(make, scenario)
