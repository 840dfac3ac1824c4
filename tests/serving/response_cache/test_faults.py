# SPDX-License-Identifier: Apache-2.0
"""Correct responses despite store failures, through the middleware.

The double's text depends on all that it gets, so an answer to another request shows.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import time

import pytest
from prometheus_client import CollectorRegistry
from redis_server import NO_REDIS, REDIS, held_port, redis_server
from serving_double import MODEL, SECRET, App, ask, make, ready, text_of

from vllm_metal.serving.config import ResponseCacheConfig, ServingConfig
from vllm_metal.serving.gate import Tenants
from vllm_metal.serving.metrics import ServerMetrics
from vllm_metal.serving.response_cache import stores
from vllm_metal.serving.response_cache.entry import Entry
from vllm_metal.serving.response_cache.sqlite_store import FILE

PREFIX = "{vllm-metal}:answers"
needs_redis = pytest.mark.skipif(REDIS is None, reason=NO_REDIS)


def chat(number):
    return {"messages": [{"role": "user", "content": f"{number}"}], "temperature": 0}


async def mark(gate, number, key=None):
    """Returns X-Cache of a request, after checking its answer."""
    fields = {"model": "m"} | chat(number)
    reply = await ask(gate, fields=fields, key=key)
    assert (reply.status, reply.text()) == (200, text_of(fields))
    return reply.x_cache


async def marks(gate, numbers, key=None):
    return [await mark(gate, number, key) for number in numbers]


def ticks():
    """A clock that ends a store's pause at once."""
    return itertools.count(step=2).__next__


def play(folder, scenario, clock=None, **cache):
    """Runs `scenario(gate)` without tenants, with `ticks` by default."""

    async def run():
        secret = folder / "secret"
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
        config = ServingConfig(None, ResponseCacheConfig(**cache, secret=secret), None)
        metrics = ServerMetrics(CollectorRegistry())
        gate = Tenants(App(), config, metrics, model=MODEL, clock=clock or ticks())
        await ready(gate)
        try:
            return await scenario(gate)
        finally:
            await gate.aclose()

    return asyncio.run(run())


def checkpoint(path):
    """Merges the write-ahead log into the database."""
    database = sqlite3.connect(path)
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    database.close()


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A SQLite file with forty responses."""
    folder = tmp_path_factory.mktemp("filled")
    play(folder, lambda gate: marks(gate, range(40)), path=folder / "answers")
    checkpoint(folder / "answers" / FILE)
    return folder / "answers" / FILE


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.more)])
def test_random_bytes_in_any_page_are_healed_within_two_requests(tmp_path, filled, step):
    pages, rng = filled.stat().st_size // 4096, random.Random(3)
    assert pages > 8
    for page in range(0, pages, step):
        answers = tmp_path / f"{page}"
        answers.mkdir()
        content = bytearray(filled.read_bytes())
        content[page * 4096 : (page + 1) * 4096] = rng.randbytes(4096)
        (answers / FILE).write_bytes(content)

        async def scenario(gate):
            for number in range(40):
                assert (await marks(gate, [number] * 3))[2] == "HIT"

        play(tmp_path, scenario, path=answers)


def scribble(path):
    path.write_bytes(random.Random(5).randbytes(path.stat().st_size))


def put_folder(path):
    path.unlink()
    path.mkdir()


#: Damages to a file in use and its companions, and whether the store heals by itself.
DAMAGES = {
    "random bytes": (lambda path: scribble(path), True),
    "random bytes beside it": (lambda path: scribble(path.with_name(f"{FILE}-wal")), True),
    "random bytes in the index": (lambda path: scribble(path.with_name(f"{FILE}-shm")), True),
    "cut short": (lambda path: os.truncate(path, path.stat().st_size // 2 + 100), True),
    "cut short beside it": (lambda path: os.truncate(path.with_name(f"{FILE}-wal"), 99), True),
    "empty": (lambda path: os.truncate(path, 0), True),
    "a folder in its place": (put_folder, False),
    "the folder is gone": (lambda path: shutil.rmtree(path.parent), True),
}


@pytest.mark.parametrize(
    ("name", "settled"),
    [
        *(("random bytes", True), ("cut short beside it", False)),
        *(("a folder in its place", True), ("the folder is gone", False)),
        *(
            pytest.param(name, settled, marks=pytest.mark.more)
            for name, settled in (
                *(("random bytes beside it", False), ("random bytes in the index", False)),
                *(("cut short", True), ("empty", False)),
            )
        ),
        *(
            pytest.param(name, settled, marks=pytest.mark.slow)
            for name, settled in (
                *(("random bytes", False), ("random bytes in the index", True)),
                *(("cut short", False), ("empty", True), ("the folder is gone", True)),
                ("a folder in its place", False),
            )
        ),
    ],
)
def test_a_file_in_use_that_is_damaged(tmp_path, name, settled):
    damage, heals = DAMAGES[name]
    path = tmp_path / "answers" / FILE

    async def scenario(gate):
        await marks(gate, range(40))
        if settled and "beside" not in name:
            checkpoint(path)
        damage(path)
        for number in range(60):
            seen = await marks(gate, [number] * 3)
            assert seen[2] == ("HIT" if heals else "MISS")
        if not heals:
            path.rmdir()
            assert (await marks(gate, [1, 1, 1]))[2] == "HIT"

    play(tmp_path, scenario, path=path.parent)


@pytest.fixture
def disk(tmp_path):
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here (it takes root on Linux)")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@contextlib.contextmanager
def no_room(folder):
    """Fills the file system."""
    rest = folder / "rest"
    with contextlib.suppress(OSError), rest.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    yield
    rest.unlink()


@contextlib.contextmanager
def small_files(folder):
    """Limits files to 20 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("place", "full"),
    [("tmp_path", small_files), pytest.param("disk", no_room, marks=pytest.mark.more)],
)
def test_a_full_disk(request, tmp_path, place, full, caplog_vllm):
    """Cached responses stay, new ones are not cached, and one log line says so."""
    folder = request.getfixturevalue(place)

    async def scenario(gate):
        await marks(gate, range(300))
        with full(folder):
            news = await marks(gate, [number for number in range(300, 500) for _ in range(2)])
            assert news[-200:] == ["MISS"] * 200  # what waits beside the file may have had room
            assert await marks(gate, range(300)) == ["HIT"] * 300
        assert (await marks(gate, [999, 999]))[1] == "HIT"

    play(tmp_path, scenario, path=folder / "answers")
    warnings = [r.getMessage() for r in caplog_vllm.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "cannot store responses" in warnings[0]


def test_a_disk_that_is_full_from_the_start(tmp_path, disk, caplog_vllm):
    """Without room for a file or a secret, every request is a miss."""
    config = ResponseCacheConfig(disk / "answers")
    with no_room(disk):
        assert len(stores.secret_of(config)) == 32
        numbers = [1, 1, 2, 2]
        found = play(tmp_path, lambda gate: marks(gate, numbers), path=config.path)
        assert found == ["MISS"] * 4
    warnings = [r.getMessage() for r in caplog_vllm.records if r.levelno == logging.WARNING]
    assert len(warnings) <= 3 and "lost when this server ends" in warnings[0]
    assert play(tmp_path, lambda gate: marks(gate, [1, 1]), path=config.path) == ["MISS", "HIT"]


@pytest.fixture
def server(tmp_path):
    """A real Redis server's process, address and client."""
    redis = pytest.importorskip("redis", reason="the extra `redis` is not installed")
    with held_port() as port, redis_server(port, tmp_path) as process:
        url = f"redis://127.0.0.1:{port}/0"
        client = redis.from_url(url)
        yield process, url, client
        client.close()


@pytest.mark.more
@needs_redis
def test_500_kept_answers_asked_for_at_once_are_500_hits(tmp_path, server, patient):
    async def scenario(gate):
        await marks(gate, range(500))
        asked = gate.app.asked
        found = await asyncio.gather(*(mark(gate, number) for number in range(500)))
        assert found == ["HIT"] * 500 and gate.app.asked == asked

    play(tmp_path, scenario, path=None, redis=server[1])


@needs_redis
def test_a_full_redis_says_what_it_has(tmp_path, server, patient, caplog_vllm):
    _, url, client = server

    async def scenario(gate):
        await marks(gate, range(50))
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)
        assert await marks(gate, range(50)) == ["HIT"] * 50
        assert await marks(gate, [n for n in range(50, 80) for _ in range(2)]) == ["MISS"] * 60
        client.config_set("maxmemory", 0)
        assert await marks(gate, [50, 50, 7]) == ["MISS", "HIT", "HIT"]

    play(tmp_path, scenario, path=None, redis=url)
    warnings = [r.getMessage() for r in caplog_vllm.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "cannot store responses" in warnings[0]


@pytest.mark.more
@needs_redis
def test_a_redis_that_pauses_under_load(tmp_path, server, caplog_vllm):
    process, url, _ = server

    async def scenario(gate):
        await marks(gate, range(20))
        os.kill(process.pid, signal.SIGSTOP)
        try:
            found = await asyncio.gather(*(mark(gate, number % 20) for number in range(400)))
            assert "MISS" in found
        finally:
            os.kill(process.pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            while await mark(gate, 3) != "HIT":  # a second later, it is asked again
                await asyncio.sleep(0.05)
        assert (await marks(gate, range(20))).count("HIT") == 20

    play(tmp_path, scenario, clock=time.monotonic, path=None, redis=url)
    assert any("cannot be used" in r.getMessage() for r in caplog_vllm.records)


def lie(secret, key):
    return Entry("whole", b'{"choices": []}').seal(secret, key)


#: Replacements of an answer by somebody with write access to Redis; from its key and value.
PLANTED = {
    "sealed with nothing": lambda key, value: lie(b"", key),
    "sealed with another secret": lambda key, value: lie(b"a guess of the secret", key),
    "sealed for another key": lambda key, value: lie(SECRET, "00" * 32),
    "a changed form": lambda key, value: value[:32] + b"s" + value[33:],
    "a changed text": lambda key, value: value[:-3] + b"x" + value[-2:],
    "the seal alone": lambda key, value: value[:32],
    "cut short": lambda key, value: value[:50],
    "one byte": lambda key, value: b"w",
    "a long one": lambda key, value: bytes(10**6),
}


@needs_redis
def test_planted_answers_are_misses(tmp_path, server, patient):
    _, url, client = server

    async def scenario(gate):
        await marks(gate, range(5))
        for planted in PLANTED.values():
            for place in client.keys(f"{PREFIX}::*"):
                digits = place.decode().rpartition(":")[2]
                client.set(place, planted(digits, client.get(place)))
            assert await marks(gate, range(5)) == ["MISS"] * 5
            assert await marks(gate, range(5)) == ["HIT"] * 5

    play(tmp_path, scenario, path=None, redis=url)


@needs_redis
def test_a_tenants_answer_under_anothers_key_is_a_miss(tmp_path, server):
    """So is an answer under another of the tenant's own keys."""
    _, url, client = server

    async def scenario():
        cache = ResponseCacheConfig(None, url)
        gate, keys = make(App(), tmp_path, response_cache=cache)
        await ready(gate)
        for name in ("acme", "other"):
            assert await marks(gate, range(6), keys[name]) == ["MISS"] * 6
        places = sorted(client.keys(f"{PREFIX}:*:*"))
        assert len(places) == 12 and sum(b":acme:" in place for place in places) == 6
        values = [client.get(place) for place in places]
        for place, value in zip(places, values[1:] + values[:1], strict=True):
            client.set(place, value)
        for name in ("acme", "other"):
            assert await marks(gate, range(6), keys[name]) == ["MISS"] * 6
            assert await marks(gate, range(6), keys[name]) == ["HIT"] * 6
        await gate.aclose()

    asyncio.run(scenario())
