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
from vllm_metal.serving.response_cache.sqlite_store import FILE, SqliteStore
from vllm_metal.serving.response_cache.store import StoreError

#: Bytes of a SQLite file that has few small answers: a page for each table and index.
EMPTY = 5 * 4096


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
        assert await store.num_bytes() in (8, EMPTY)

    play(make, keep)
    play(make, look)


def test_an_answer_is_kept_for_its_time(make):
    async def scenario(store):
        await store.put(key(1), b"one")
        assert await store.get(key(1)) == b"one"
        await asyncio.sleep(0.3)
        assert await store.get(key(1)) is None
        await store.put(key(2), b"two")  # which clears up
        assert await store.num_bytes() in (3, EMPTY)

    play(make, scenario, ttl_s=0.2)


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


def test_sqlite_keeps_what_is_used(tmp_path):
    now = [1e9]

    async def scenario(store):
        for number in range(5):
            now[0] += 100
            await store.put(key(number), bytes(20_000))
        now[0] += 100
        assert await store.get(key(0)) is not None
        await store.put(key(5), bytes(20_000))
        return [await store.get(key(n)) is not None for n in range(6)]

    most = EMPTY + 6 * 4096 + 5 * 20_480
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


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_sqlite_survives_kill_9_in_the_middle_of_a_write(tmp_path, times):
    """What was said to be kept is there, whole, and the file is as SQLite wants it."""
    for attempt in range(times):
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
        database.close()
        assert total <= 10**6


def test_a_damaged_file_is_made_anew(tmp_path, caplog_vllm):
    (tmp_path / FILE).write_bytes(b"no database" * 1000)

    async def scenario(store):
        assert await store.get(key(1)) is None
        await store.put(key(1), b"one")
        assert await store.get(key(1)) == b"one"

    play(lambda *given: SqliteStore(tmp_path, *given), scenario)
    assert "made anew" in caplog_vllm.text


def overwrite(path, page, rng):
    with path.open("r+b") as file:
        file.seek(page * 4096)
        file.write(rng.randbytes(4096))


DAMAGES = {
    **{
        f"page {page}": lambda path, rng, page=page: overwrite(path, page, rng)
        for page in (0, 1, 2, 3, 5, 8, 13, 21)
    },
    "cut short": lambda path, rng: os.truncate(path, path.stat().st_size // 2 + 100),
    "empty": lambda path, rng: os.truncate(path, 0),
    "another program's": lambda path, rng: path.write_bytes(b"no database" * 1000),
    "gone": lambda path, rng: path.unlink(),
}


@pytest.mark.parametrize("while_open", [True, False])
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_heals_within_two_requests(tmp_path, name, while_open):
    """And what it says meanwhile is what was kept, or nothing."""
    values = {key(n): bytes([n % 251]) * (100 + 97 * n) for n in range(60)}

    async def keep(store):
        for one, value in values.items():
            await store.put(one, value)
        if while_open:
            damage()
            await look(store)

    def damage():
        database = sqlite3.connect(tmp_path / FILE)  # nothing waits beside the file
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        database.close()
        DAMAGES[name](tmp_path / FILE, random.Random(name))

    async def look(store):
        for one in (key(7), key(8)):  # two requests of answers that may be gone
            found = await store.get(one)
            assert found is None or isinstance(found, bytes)
            await store.put(one, values[one])
        for one, value in values.items():
            assert await store.get(one) in (None, value) or name.startswith("page")
            await store.put(one, value)
        for one, value in values.items():  # again: where damage is met, all before it is lost
            await store.put(one, value)
        assert [await store.get(one) for one in values] == list(values.values())

    make = lambda *given: SqliteStore(tmp_path, *given)  # noqa: E731
    play(make, keep)
    if not while_open:
        damage()
        play(make, look)
    database = sqlite3.connect(tmp_path / FILE)
    assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    database.close()


def test_a_folder_in_the_files_place_is_an_outage(tmp_path):
    (tmp_path / FILE).mkdir()

    async def look(store):
        for question in (store.get(key(1)), store.put(key(1), b"one"), store.num_bytes()):
            with pytest.raises(StoreError):
                await question

    play(lambda *given: SqliteStore(tmp_path, *given), look)


def test_tables_of_another_version_are_made_anew(tmp_path):
    database = sqlite3.connect(tmp_path / FILE)
    database.execute("CREATE TABLE answers (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID")
    database.close()

    async def scenario(store):
        await store.put(key(1), b"one")
        assert await store.get(key(1)) == b"one"

    play(lambda *given: SqliteStore(tmp_path, *given), scenario)


@pytest.mark.parametrize(
    "length", [1100, 10_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (100, 2000))]
)
def test_the_file_is_hardly_larger_than_its_bytes(tmp_path, length):
    """With what waits beside it, when it has been full for long."""
    most = 8 * 10**6

    async def scenario(store):
        rng = random.Random(length)
        for number in range(3 * most // (length + 200)):
            await store.put(key(rng.getrandbits(200)), rng.randbytes(length))
            if number % 7 == 0:
                await store.get(key(number // 2))
        held = sum(path.stat().st_size for path in tmp_path.iterdir())
        assert 0.8 * most < await store.num_bytes() <= most
        return held

    held = play(lambda *given: SqliteStore(tmp_path, *given), scenario, most)
    print(f"answers of {length} bytes: {held / most:.2f}")
    assert held <= 1.2 * most


def test_an_owner_may_be_purged_and_all_may(make):
    async def scenario(store):
        whose = ["a", "a.b", ""] * 1000

        async def gone():
            return [await store.get(key(n), whose[n]) is None for n in range(0, 3000, 37)]

        for number, owner in enumerate(whose):
            await store.put(key(number), b"x" * 1000, owner)
        full = await store.num_bytes()
        assert await store.purge("a") == 1000 and await store.purge("b") == 0
        assert await gone() == [whose[n] == "a" for n in range(0, 3000, 37)]
        assert 0.6 * full < await store.num_bytes() < 0.75 * full
        assert await store.purge() == 2000
        assert all(await gone()) and await store.num_bytes() in (0, EMPTY)
        await store.put(key(1), b"again", "a")
        assert await store.get(key(1), "a") == b"again"
        assert await store.get(key(1), "b") is None

    play(make, scenario, max_bytes=10**8)


def test_another_process_may_purge_what_a_server_uses(make):
    """Here another store, as the command has one; answers come in meanwhile."""

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


def test_a_purge_makes_no_file(tmp_path):
    async def scenario(store):
        assert await store.purge() == 0

    play(lambda *given: SqliteStore(tmp_path / "answers", *given), scenario)
    assert not (tmp_path / "answers").exists()


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
            assert [await store.get(key(n)) for n in range(60)] == [b"x" * 100] * 60
        for store in stores:
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
@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("before", [True, False])
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
