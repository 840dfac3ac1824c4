# SPDX-License-Identifier: Apache-2.0
"""Behavior specific to the SQLite store, and its failures."""

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys

import pytest
from response_stores import EMPTY, key, play

from vllm_metal.serving.response_cache.sqlite_store import FILE, SqliteStore
from vllm_metal.serving.response_cache.store import StoreError


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


def test_what_is_too_old_is_none_before_anything_clears_up(tmp_path):
    now = [1e9]

    async def scenario(store):
        await store.put(key(1), b"one")
        now[0] += 1001.0
        assert await store.get(key(1)) is None

    play(lambda *given: SqliteStore(tmp_path, *given), scenario, clock=lambda: now[0])


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


@pytest.mark.parametrize(
    "times",
    [1, pytest.param(3, marks=pytest.mark.more), pytest.param(10, marks=pytest.mark.slow)],
)
def test_sqlite_survives_kill_9_in_the_middle_of_a_write(tmp_path, times):
    """Every confirmed answer is whole, and SQLite finds the file sound."""
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
    assert "creating it anew" in caplog_vllm.text


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
BY_DAY = (("page 0", True), ("page 5", False), ("cut short", True), ("gone", True))


@pytest.mark.parametrize(
    ("name", "while_open"),
    [
        *BY_DAY,
        *(
            pytest.param(name, is_open, marks=pytest.mark.more if is_open else pytest.mark.slow)
            for name in DAMAGES
            for is_open in (True, False)
            if (name, is_open) not in BY_DAY
        ),
    ],
)
def test_a_damaged_file_heals_within_two_requests(tmp_path, name, while_open):
    """Until then it returns what was kept, or nothing."""
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
    "length",
    [
        *(10_000, pytest.param(1100, marks=pytest.mark.more)),
        *(pytest.param(n, marks=pytest.mark.slow) for n in (100, 2000)),
    ],
)
def test_the_file_is_hardly_larger_than_its_bytes(tmp_path, length):
    """With its write-ahead file, after long use at the limit."""
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


def test_a_purge_makes_no_file(tmp_path):
    async def scenario(store):
        assert await store.purge() == 0

    play(lambda *given: SqliteStore(tmp_path / "answers", *given), scenario)
    assert not (tmp_path / "answers").exists()


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


@pytest.mark.parametrize("times", [5, pytest.param(30, marks=pytest.mark.more)])
def test_servers_may_make_a_sqlite_file_at_the_same_time(tmp_path, patient, times):
    async def scenario(folder):
        stores = [SqliteStore(folder, 10**6, 1000.0) for _ in range(4)]
        await asyncio.gather(*(store.put(key(n), b"x") for n, store in enumerate(stores)))
        assert [await stores[0].get(key(n)) for n in range(4)] == [b"x"] * 4
        for store in stores:
            await store.close()

    for number in range(times):
        asyncio.run(scenario(tmp_path / str(number)))


def test_two_servers_may_share_a_sqlite_file(tmp_path, patient):
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
