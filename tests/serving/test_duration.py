# SPDX-License-Identifier: Apache-2.0
"""The duration histogram has every generating request once, by outcome."""

import asyncio
from types import SimpleNamespace
from typing import get_args

import pytest
from serving_double import App, ask, counted, make, ready

from vllm_metal.serving import duration
from vllm_metal.serving.metrics import Outcome

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
NAME = "vllm:request_duration_seconds"


def counts(gate):
    """Returns the nonzero numbers of requests by outcome."""
    found = {name: counted(gate, f"{NAME}_count", outcome=name) for name in get_args(Outcome)}
    return {name: count for name, count in found.items() if count}


def seconds(gate, outcome):
    return counted(gate, f"{NAME}_sum", outcome=outcome)


async def at_once(seconds):
    await asyncio.sleep(0)


@pytest.mark.parametrize("tenants", [("acme",), ()])
@pytest.mark.parametrize("stream", [False, True])
def test_computed_and_found(tmp_path, tenants, stream):
    async def play():
        gate, keys = make(App(), tmp_path, tenants=tenants)
        await ready(gate)
        for _ in range(3):
            await ask(gate, fields=CHAT | {"stream": stream}, key=keys.get("acme"))
        return counts(gate)

    assert asyncio.run(play()) == {"computed": 1, "hit": 2}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
def test_those_that_time_out_are_in_it(tmp_path, stream, quiet):
    """With their partial answers, or with a 504."""

    async def play():
        app = App(gate=asyncio.Event(), quiet=quiet)
        gate, keys = make(app, tmp_path, cache=False, timeout_s=9.0, sleep=at_once)
        reply = await ask(gate, fields=CHAT | {"stream": stream}, key=keys["acme"])
        assert reply.status == (504 if quiet else 200)
        return counts(gate)

    assert asyncio.run(play()) == {"timed_out": 1}


def test_a_twin_that_waits_too_long(tmp_path):
    """It never reached the engine, so vLLM's figures lack it."""

    async def play():
        app = App(gate=asyncio.Event(), deaf=True)
        gate, keys = make(app, tmp_path, timeout_s=9.0, sleep=at_once)
        await ready(gate)
        asked = [ask(gate, fields=CHAT, key=keys["acme"]) for _ in range(2)]
        assert {reply.status for reply in await asyncio.gather(*asked)} == {504}
        return counts(gate)

    assert asyncio.run(play()) == {"timed_out": 2}


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up(tmp_path, cache, stream):
    async def play():
        gone = asyncio.Event()
        app = App(gate=asyncio.Event())
        gate, keys = make(app, tmp_path, cache=cache)
        await ready(gate)
        fields = CHAT | {"stream": stream}
        asked = asyncio.create_task(ask(gate, fields=fields, key=keys["acme"], gone=gone))
        while not app.asked:
            await asyncio.sleep(0)
        gone.set()
        await asked
        return counts(gate)

    assert asyncio.run(play()) == {"aborted": 1}


@pytest.mark.parametrize("status", [400, 500])
def test_errors(tmp_path, status):
    async def play():
        gate, keys = make(App(status=status), tmp_path, cache=False)
        await ask(gate, fields=CHAT, key=keys["acme"])
        return counts(gate)

    assert asyncio.run(play()) == {"error": 1}


def test_a_server_that_raises(tmp_path):
    async def broken(scope, receive, send):
        raise RuntimeError

    async def play():
        broken.state = App().state
        gate, keys = make(broken, tmp_path, cache=False)
        with pytest.raises(RuntimeError):
            await ask(gate, fields=CHAT, key=keys["acme"])
        return counts(gate)

    assert asyncio.run(play()) == {"error": 1}


def test_a_response_in_the_background_is_answered_at_once_and_counts_apart(tmp_path):
    async def play():
        gate, keys = make(App(), tmp_path, cache=False)
        await ask(gate, "/v1/responses", CHAT | {"background": True}, keys["acme"])
        return counts(gate)

    assert asyncio.run(play()) == {"background": 1}


def test_what_does_not_generate_is_not_in_it(tmp_path):
    async def play():
        gate, keys = make(App(), tmp_path, cache=False)
        await ask(gate, fields=CHAT, key="wrong")
        await ask(gate, fields=CHAT | {"cache_salt": 1}, key=keys["acme"])
        await ask(gate, "/tokenize", {"prompt": "a"}, keys["acme"])
        await ask(gate, "/health", method="GET")
        return counts(gate)

    assert asyncio.run(play()) == {}


def test_it_lasts_until_the_client_has_all(tmp_path, monkeypatch):
    now = [5.0]
    monkeypatch.setattr(duration, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    async def play():
        app, reads = App(), asyncio.Event()
        gate, keys = make(app, tmp_path, cache=False)
        asked = asyncio.create_task(ask(gate, fields=CHAT, key=keys["acme"], reads=reads))
        while not app.asked:
            await asyncio.sleep(0)
        now[0] += 7.0
        assert counts(gate) == {}
        reads.set()
        await asked
        return seconds(gate, "computed")

    assert asyncio.run(play()) == 7.0
