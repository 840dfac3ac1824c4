# SPDX-License-Identifier: Apache-2.0
"""What every store does, in SQLite and in a real Redis server, and how each breaks."""

import asyncio
import errno
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time

import pytest
from redis_server import NO_REDIS, REDIS, redis_server

from vllm_metal.serving.response_cache.redis_store import RedisStore
from vllm_metal.serving.response_cache.sqlite_store import FILE, ROW_BYTES, SqliteStore
from vllm_metal.serving.response_cache.store import StoreError


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    pytest.importorskip("redis", reason="the extra `redis` is not installed")
    if REDIS is None:
        pytest.skip(NO_REDIS)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with redis_server(port, tmp_path_factory.mktemp("redis")):
        yield f"redis://127.0.0.1:{port}/0"


@pytest.fixture(params=["sqlite", "redis"])
def make(request, tmp_path):
    """Makes the same store again and again: of most bytes, a time and a clock."""
    if request.param == "sqlite":
        return lambda *given: SqliteStore(tmp_path, *given)
    url = request.getfixturevalue("redis_url")
    import redis

    redis.from_url(url).flushall()
    return lambda *given: RedisStore(url, *given)


def key(number):
    return f"{number:064x}"


def play(make, scenario, max_bytes=10**6, ttl_s=1000.0, clock=time.time):
    async def run():
        store = make(max_bytes, ttl_s, clock)
        try:
            return await scenario(store)
        finally:
            await store.close()

    return asyncio.run(run())


def test_what_is_kept_is_there_also_for_another_server(make):
    async def keep(store):
        assert await store.get(key(1)) is None
        await store.put(key(1), b"one\0")
        await store.put(key(2), b"two")
        await store.put(key(1), b"again")

    async def look(store):
        assert [await store.get(key(n)) for n in (1, 2, 3)] == [b"again", b"two", None]
        assert await store.num_bytes() in (8, 8 + 2 * ROW_BYTES)

    play(make, keep)
    play(make, look)


def test_an_answer_is_kept_for_its_time(make):
    async def scenario(store):
        await store.put(key(1), b"one")
        assert await store.get(key(1)) == b"one"
        await asyncio.sleep(0.3)
        assert await store.get(key(1)) is None
        await store.put(key(2), b"two")  # which clears up
        assert await store.num_bytes() < 2 * (3 + ROW_BYTES)

    play(make, scenario, ttl_s=0.2)


def test_bytes_are_bounded(make):
    async def scenario(store):
        rng, most = random.Random(1), 0
        for number in range(200):
            await store.put(key(number % 50), bytes(rng.randrange(1, 3000)))
            most = max(most, await store.num_bytes())
        await store.put(key(99), bytes(30_001))  # longer than all there may be
        assert await store.get(key(99)) is None
        held = [n for n in range(50) if await store.get(key(n)) is not None]
        assert most <= 30_000 and len(held) > 8
        return most

    assert play(make, scenario, max_bytes=30_000) > 20_000


def test_the_oldest_make_room(make):
    async def scenario(store):
        for number in range(8):
            await store.put(key(number), bytes(1000))
        return [await store.get(key(number)) is not None for number in range(8)]

    ticks = iter(range(10**9, 10**9 + 10**6))
    kept = play(make, scenario, max_bytes=5 * (1000 + ROW_BYTES), clock=lambda: float(next(ticks)))
    assert kept == sorted(kept) and kept.count(True) in (5, 6)


def test_sqlite_keeps_what_is_used(tmp_path):
    now = [1e9]

    async def scenario(store):
        for number in range(5):
            now[0] += 100
            await store.put(key(number), bytes(1000))
        now[0] += 100
        assert await store.get(key(0)) is not None
        await store.put(key(5), bytes(1000))
        return [await store.get(key(n)) is not None for n in range(6)]

    most = 5 * (1000 + ROW_BYTES)
    kept = play(lambda *g: SqliteStore(tmp_path, *g), scenario, most, 10**6, lambda: now[0])
    assert kept == [True, False, True, True, True, True]


WRITER = """
import asyncio, sys
from pathlib import Path
from vllm_metal.serving.response_cache.sqlite_store import SqliteStore
async def main():
    store = SqliteStore(Path(sys.argv[1]), 10**6, 1000.0)
    number = 0
    while True:
        await store.put(f"{number % 100:064x}", number.to_bytes(8, "big") * 3000)
        print(number, flush=True)
        number += 1
asyncio.run(main())
"""


def test_sqlite_survives_kill_9_in_the_middle_of_a_write(tmp_path):
    """Ten times: what was said to be kept is there, whole, and the file is as SQLite wants it."""
    for attempt in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, tmp_path], stdout=subprocess.PIPE, text=True
        )
        last = -1
        for _ in range(20 + 7 * attempt):
            last = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        said = process.stdout.read().split()
        process.wait()
        last = int(said[-1]) if said else last

        async def check(store, last=last):
            assert await store.get(key(last % 100)) == last.to_bytes(8, "big") * 3000
            for number in range(100):
                value = await store.get(key(number))
                assert value is None or value == value[:8] * 3000
            await store.put(key(7), b"goes on")
            assert await store.get(key(7)) == b"goes on"
            return await store.num_bytes()

        total = play(lambda *given: SqliteStore(tmp_path, *given), check)
        with sqlite3.connect(tmp_path / FILE) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            (counted,) = database.execute("SELECT SUM(size) FROM answers").fetchone()
        database.close()
        assert counted == total <= 10**6


def test_a_damaged_file_is_made_anew(tmp_path, caplog_vllm):
    (tmp_path / FILE).write_bytes(b"no database" * 1000)

    async def scenario(store):
        assert await store.get(key(1)) is None
        await store.put(key(1), b"one")
        assert await store.get(key(1)) == b"one"

    play(lambda *given: SqliteStore(tmp_path, *given), scenario)
    assert "made anew" in caplog_vllm.text


def test_the_file_is_its_owners(tmp_path):
    async def scenario(store):
        await store.put(key(1), b"one")
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "a").iterdir()}
        assert modes.keys() >= {FILE, f"{FILE}-wal"} and set(modes.values()) == {0o600}
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700

    play(lambda *given: SqliteStore(tmp_path / "a", *given), scenario)


def test_a_folder_that_cannot_be_made_is_an_outage(tmp_path):
    (tmp_path / "file").write_text("")

    async def scenario(store):
        with pytest.raises(StoreError):
            await store.get(key(1))
        with pytest.raises(StoreError):
            await store.put(key(1), b"one")

    play(lambda *given: SqliteStore(tmp_path / "file", *given), scenario)


def test_two_servers_may_share_a_sqlite_file(tmp_path):
    async def scenario():
        stores = [SqliteStore(tmp_path, 10**6, 1000.0) for _ in range(2)]

        async def work(store, first):
            for number in range(first, first + 40):
                await store.put(key(number), b"x" * 100)

        await asyncio.gather(work(stores[0], 0), work(stores[1], 20))
        for store in stores:
            assert await store.num_bytes() == 60 * (100 + ROW_BYTES)
            await store.close()

    asyncio.run(scenario())


def test_redis_that_is_not_there_is_an_outage_at_once():
    pytest.importorskip("redis", reason="the extra `redis` is not installed")

    async def scenario(store):
        for question in (store.get(key(1)), store.put(key(1), b"one"), store.num_bytes()):
            with pytest.raises(StoreError) as error:
                await question
            assert "s3cr3t" not in str(error.value)

    url = "redis://:s3cr3t@127.0.0.1:1/0"
    play(lambda *given: RedisStore(url, *given), scenario)


@pytest.mark.skipif(REDIS is None, reason=NO_REDIS)
def test_redis_that_hangs_is_an_outage(redis_url, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with redis_server(port, tmp_path) as process:

        async def scenario(store):
            await store.put(key(1), b"one")
            os.kill(process.pid, signal.SIGSTOP)
            with pytest.raises(StoreError):
                await asyncio.wait_for(store.get(key(1)), 20)
            os.kill(process.pid, signal.SIGCONT)
            await asyncio.sleep(0.1)
            assert await store.get(key(1)) == b"one"

        play(lambda *given: RedisStore(f"redis://127.0.0.1:{port}/0", *given), scenario)


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
