# SPDX-License-Identifier: Apache-2.0
"""Cached responses, with a fake vLLM whose text depends on its whole input."""

import asyncio
import contextlib
import json
import logging
import random
import sqlite3

import pytest
from serving_double import App, ask, counted, make, ready, text_of

from vllm_metal.serving import gate as gate_module
from vllm_metal.serving.response_cache.key import HARMLESS
from vllm_metal.serving.response_cache.sqlite_store import FILE
from vllm_metal.serving.response_cache.store import StoreError
from vllm_metal.serving.response_cache.stores import open_store

HELLO = [{"role": "user", "content": "Hello"}]
CHAT = {"model": "m", "messages": HELLO, "temperature": 0}
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
ANSWERED = {"model": "m", "messages": HELLO, "prompt": "Hello", "temperature": 0}


def play(tmp_path, scenario, app=None, **options):
    """Runs `scenario(gate, keys, app)` with a server whose model is identified."""

    async def run():
        double = app or App()
        gate, keys = make(double, tmp_path, **options)
        await ready(gate)
        try:
            return await scenario(gate, keys, double)
        finally:
            await gate.aclose()

    return asyncio.run(run())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def twice(gate, key, first, second=None, path=PATHS[0], **more):
    """Returns X-Cache of two requests, and their replies."""
    replies = [
        await ask(gate, path, fields, key, **more)
        for fields in (first, first if second is None else second)
    ]
    return [reply.x_cache for reply in replies], replies


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_repeat_is_answered_without_the_engine(tmp_path, path, stream):
    async def scenario(gate, keys, app):
        fields = ANSWERED | {"stream": stream, "stream_options": {"include_usage": True}}
        marks, (first, again) = await twice(gate, keys["acme"], fields, path=path)
        assert marks == ["MISS", "HIT"] and app.asked == 1
        assert first.body == again.body and b"usage" in again.body
        assert first.headers["content-type"] == again.headers["content-type"]
        name = "vllm:response_cache_requests_total"
        results = [counted(gate, name, result=x) for x in ("hit", "miss", "bypass")]
        assert results == [1, 1, 0]
        await ask(gate, "/metrics", key=keys["metrics"], method="GET")
        assert counted(gate, "vllm:response_cache_bytes") > 0

    play(tmp_path, scenario)


@pytest.mark.parametrize("path", PATHS)
def test_streams_and_whole_answers_are_kept_apart(tmp_path, path):
    async def scenario(gate, keys, app):
        whole, stream = ANSWERED | {"stream": False}, ANSWERED | {"stream": True}
        for fields, mark in ((stream, "MISS"), (whole, "MISS"), (stream, "HIT"), (whole, "HIT")):
            reply = await ask(gate, path, fields, keys["acme"])
            assert reply.x_cache == mark
            events = reply.headers["content-type"].startswith("text/event-stream")
            assert events == fields["stream"]

    play(tmp_path, scenario)


def test_streams_are_kept_apart_by_the_usage_in_them(tmp_path):
    """vLLM reads the options the same, in any spelling."""

    async def scenario(gate, keys, app):
        def stream(**options):
            return CHAT | {"stream": True, "stream_options": options}

        silent, told = stream(), stream(include_usage=True)
        every = stream(include_usage=True, continuous_usage_stats=True)
        for fields, mark, has in (
            (silent, "MISS", False),
            (told, "MISS", True),
            (every, "MISS", True),
            (stream(include_usage="false"), "HIT", False),
            (stream(include_usage="yes"), "HIT", True),
            (every, "HIT", True),
        ):
            reply = await ask(gate, fields=fields, key=keys["acme"])
            assert reply.x_cache == mark
            assert any("usage" in chunk for chunk in reply.chunks()) == has

    play(tmp_path, scenario)


#: A value for every field of a body that vLLM knows, and for some that nobody does.
CHANGES = {
    "messages": [{"role": "user", "content": "Hello!"}],
    "model": "other",
    "temperature": 0.0,
    "max_tokens": 5,
    "max_completion_tokens": 5,
    "seed": 1,
    "n": 2,
    "stop": ["a"],
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"1": 2},
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "json_object"},
    "top_p": 0.5,
    "top_k": 3,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "chat_template": "x",
    "chat_template_kwargs": {"a": 1},
    "add_generation_prompt": False,
    "echo": True,
    "cache_salt": "mine",
    "ignore_eos": True,
    "min_tokens": 1,
    "return_token_ids": True,
    "session_id": "s",
    "vllm_xargs": {"a": 1},
    "structured_outputs": {"choice": ["a"]},
    "unknown_to_all": None,
    "Stream": True,
    "user_": "x",
}


def test_every_field_outside_the_harmless_set_changed_is_a_miss(tmp_path):
    async def scenario(gate, keys, app):
        for number, change in enumerate([{}, *({name: CHANGES[name]} for name in CHANGES)]):
            reply = await ask(gate, fields=CHAT | change, key=keys["acme"])
            assert (reply.x_cache, app.asked) == ("MISS", number + 1), change

    play(tmp_path, scenario)


def test_a_harmless_field_changed_is_a_hit(tmp_path):
    values = {"stream": "false", "stream_options": None, "metadata": {"a": "b"}, "priority": 3}

    async def scenario(gate, keys, app):
        assert (await ask(gate, fields=CHAT, key=keys["acme"])).x_cache == "MISS"
        for name in HARMLESS:
            changed = CHAT | {name: values.get(name, "x")}
            assert (await ask(gate, fields=changed, key=keys["acme"])).x_cache == "HIT", name

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (PATHS[0], {"temperature": 0.7}),
        (PATHS[0], {"temperature": None}),
        (PATHS[0], {"temperature": 1, "seed": -1}),  # vLLM takes it for none
        (PATHS[0], {"temperature": 1, "seed": "-1"}),
        (PATHS[0], {"temperature": 1, "seed": -1.0}),
        (PATHS[0], {"messages": None}),  # vLLM will refuse it
        (PATHS[0], {"stream_options": "x", "temperature": 1}),  # likewise
        (PATHS[0], {"stream": True, "stream_options": [], "temperature": [0]}),  # likewise
        (PATHS[2], {"temperature": 1, "seed": 1}),  # which has no seed
        ("/v1/responses", {}),
    ],
)
def test_what_the_engine_would_not_say_again_goes_past_the_cache(tmp_path, path, change):
    async def scenario(gate, keys, app):
        fields = {name: value for name, value in (CHAT | change).items() if value is not None}
        marks, _ = await twice(gate, keys["acme"], fields, path=path)
        assert marks == ["BYPASS", "BYPASS"] and app.asked == 2
        assert counted(gate, "vllm:response_cache_requests_total", result="bypass") == 2

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    "change", [{"temperature": 0.9, "seed": 0}, {"temperature": "0"}, {"temperature": False}]
)
def test_a_seed_or_no_temperature_makes_a_request_repeatable(tmp_path, change):
    async def scenario(gate, keys, app):
        fields = CHAT | change
        assert (await twice(gate, keys["acme"], fields))[0] == ["MISS", "HIT"]

    play(tmp_path, scenario)


def test_a_client_may_ask_for_a_new_answer(tmp_path):
    async def scenario(gate, keys, app):
        more = {"headers": [(b"cache-control", b"no-cache")]}
        assert (await twice(gate, keys["acme"], CHAT, **more))[0] == ["BYPASS", "BYPASS"]

    play(tmp_path, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_no_tenant_gets_anothers_answer(tmp_path, stream):
    async def scenario(gate, keys, app):
        fields = CHAT | {"stream": stream}
        for name, mark in (("acme", "MISS"), ("other", "MISS"), ("acme", "HIT"), ("other", "HIT")):
            assert (await ask(gate, fields=fields, key=keys[name])).x_cache == mark
        assert app.asked == 2

    play(tmp_path, scenario)


def test_an_answer_under_another_key_is_no_answer(tmp_path):
    """Write access to the store does not move an answer to another tenant."""

    async def scenario(gate, keys, app):
        await ask(gate, fields=CHAT, key=keys["acme"])
        with contextlib.closing(sqlite3.connect(tmp_path / "answers" / FILE)) as database:
            ((value,),) = database.execute("SELECT value FROM answers").fetchall()
            await ask(gate, fields=CHAT, key=keys["other"])
            database.execute("UPDATE answers SET value = ?", (value,))
            database.commit()
        marks = [(await ask(gate, fields=CHAT, key=keys[n])).x_cache for n in ("acme", "other")]
        assert marks == ["HIT", "MISS"]

    play(tmp_path, scenario)


@pytest.mark.parametrize(
    "app", [{"status": 500}, {"status": 400}, {"finish": "abort"}, {"finish": "error"}], ids=str
)
def test_errors_and_aborted_answers_are_never_kept(tmp_path, app):
    async def scenario(gate, keys, double):
        for stream in (False, True):
            marks, _ = await twice(gate, keys["acme"], CHAT | {"stream": stream})
            assert marks == ["MISS", "MISS"]
        assert double.asked == 4

    play(tmp_path, scenario, App(**app))


class CutOff(App):
    """A vLLM that fails in the middle of a stream, in one of two ways."""

    error = False

    async def send_stream(self, path, fields, finish, send):
        async def some(message):
            body = message.get("body", b"")
            if self.error and b"finish_reason" in body and b'"stop"' in body:
                body = b'data: {"error": {"message": "no"}}\n\n'
            elif not self.error and b"[DONE]" in body:
                return
            await send({**message, "body": body} if "body" in message else message)

        await super().send_stream(path, fields, finish, some)


@pytest.mark.parametrize("error", [False, True])
def test_truncated_streams_and_errors_in_them_are_never_kept(tmp_path, error):
    async def scenario(gate, keys, app):
        app.error = error
        assert (await twice(gate, keys["acme"], CHAT | {"stream": True}))[0] == ["MISS", "MISS"]

    play(tmp_path, scenario, CutOff())


def test_a_long_answer_is_passed_on_and_not_kept(tmp_path):
    async def scenario(gate, keys, app):
        marks, replies = await twice(gate, keys["acme"], CHAT | {"stream": True})
        assert marks == ["MISS", "MISS"]
        assert {reply.text() for reply in replies} == {text_of(CHAT)}

    play(tmp_path, scenario, max_answer_bytes=200)


@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.more)])
def test_64_twins_make_one_generation(tmp_path, stream):
    async def scenario(gate, keys, app):
        app.gate = asyncio.Event()
        fields = CHAT | {"stream": stream}
        coalesced = [
            asyncio.create_task(ask(gate, fields=fields, key=keys["acme"])) for _ in range(64)
        ]
        while app.asked == 0:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        app.gate.set()
        replies = await asyncio.gather(*coalesced)
        assert app.asked == 1
        assert sorted(reply.x_cache for reply in replies) == ["HIT"] * 63 + ["MISS"]
        assert len({reply.body for reply in replies}) == 1

    play(tmp_path, scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_twins_do_not_wait_for_a_client_that_does_not_read(tmp_path, stream):
    async def scenario(gate, keys, app):
        reads, fields = asyncio.Event(), CHAT | {"stream": stream}
        slow = asyncio.create_task(ask(gate, fields=fields, key=keys["acme"], reads=reads))
        await until(lambda: app.asked == 1)
        replies = await asyncio.gather(*(ask(gate, fields=fields, key=keys["acme"]) for _ in "ab"))
        assert [reply.x_cache for reply in replies] == ["HIT", "HIT"] and app.asked == 1
        assert not slow.done()
        reads.set()
        assert (await slow).body == replies[0].body and (await slow).ended

    play(tmp_path, scenario)


def test_twins_of_an_answer_that_grows_too_long_ask_for_themselves_at_once(tmp_path):
    async def scenario(gate, keys, app):
        reads, fields = asyncio.Event(), CHAT | {"stream": True}
        slow = asyncio.create_task(ask(gate, fields=fields, key=keys["acme"], reads=reads))
        await until(lambda: app.asked == 1)
        replies = await asyncio.gather(*(ask(gate, fields=fields, key=keys["acme"]) for _ in "ab"))
        assert [reply.x_cache for reply in replies] == ["MISS", "MISS"] and app.asked == 3
        reads.set()
        assert (await slow).body == replies[0].body

    play(tmp_path, scenario, max_answer_bytes=200)


def test_when_the_first_twin_goes_away_another_asks(tmp_path):
    async def scenario(gate, keys, app):
        app.gate, gone = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(ask(gate, fields=CHAT, key=keys["acme"], gone=gone))
        while app.asked == 0:
            await asyncio.sleep(0.001)
        others = [asyncio.create_task(ask(gate, fields=CHAT, key=keys["acme"])) for _ in range(5)]
        await asyncio.sleep(0.01)
        gone.set()
        await first
        while app.asked == 1:
            await asyncio.sleep(0.001)
        app.gate.set()
        replies = await asyncio.gather(*others)
        assert app.asked == 2
        assert {reply.text() for reply in replies} == {text_of(CHAT)}

    play(tmp_path, scenario)


def test_a_twin_that_goes_away_does_not_disturb_the_others(tmp_path):
    async def scenario(gate, keys, app):
        app.gate, gone = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(ask(gate, fields=CHAT, key=keys["acme"]))
        while app.asked == 0:
            await asyncio.sleep(0.001)
        leaves = asyncio.create_task(ask(gate, fields=CHAT, key=keys["acme"], gone=gone))
        stays = asyncio.create_task(ask(gate, fields=CHAT, key=keys["acme"]))
        await asyncio.sleep(0.01)
        gone.set()
        assert (await leaves).status is None
        app.gate.set()
        assert [(await x).status for x in (first, stays)] == [200, 200] and app.asked == 1

    play(tmp_path, scenario)


def test_twins_of_an_answer_that_is_not_kept_ask_for_themselves(tmp_path):
    async def scenario(gate, keys, app):
        app.gate, app.status = asyncio.Event(), 500
        coalesced = [
            asyncio.create_task(ask(gate, fields=CHAT, key=keys["acme"])) for _ in range(4)
        ]
        while app.asked == 0:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        app.gate.set()
        assert {reply.status for reply in await asyncio.gather(*coalesced)} == {500}
        assert app.asked == 4

    play(tmp_path, scenario)


class Broken:
    """A store that may fail."""

    def __init__(self, inner):
        self.inner, self.out, self.calls = inner, False, 0

    def __getattr__(self, name):
        async def method(*args):
            self.calls += 1
            if self.out:
                raise StoreError("out of order")
            return await getattr(self.inner, name)(*args)

        return method


def test_an_outage_means_a_miss_and_one_warning(tmp_path, caplog_vllm, monkeypatch):
    now, made = [0.0], []

    def open_broken(config):
        made.append(Broken(open_store(config)))
        return made[0]

    monkeypatch.setattr(gate_module, "open_store", open_broken)

    async def scenario(gate, keys, app):
        (store,) = made
        assert (await ask(gate, fields=CHAT, key=keys["acme"])).x_cache == "MISS"
        store.out = True
        for _ in range(20):
            now[0] += 0.3
            reply = await ask(gate, fields=CHAT, key=keys["acme"])
            assert (reply.status, reply.x_cache) == (200, "MISS")
        assert store.calls < 20  # it is left alone for a while
        store.out, now[0] = False, now[0] + 10
        assert (await ask(gate, fields=CHAT, key=keys["acme"])).x_cache == "HIT"

    play(tmp_path, scenario, clock=lambda: now[0])
    warnings = [r.getMessage() for r in caplog_vllm.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and "every request is a miss" in warnings[0]


def test_until_the_model_is_known_nothing_is_kept(tmp_path):
    async def scenario():
        gate, keys = make(App(), tmp_path, model=(lambda state: None, lambda state, memo: 1 / 0))
        assert (await ask(gate, fields=CHAT, key=keys["acme"])).x_cache == "BYPASS"
        await ready(gate)
        assert (await ask(gate, fields=CHAT, key=keys["acme"])).x_cache == "BYPASS"

    asyncio.run(scenario())


def test_answers_outlive_the_server_and_not_a_change_of_the_model(tmp_path):
    from serving_double import render

    marks = []
    for model in ("a", "a", "b", "a"):

        async def scenario(gate, keys, app):
            return (await ask(gate, fields=CHAT)).x_cache

        functions = (lambda state: render, lambda state, memo, model=model: model)
        marks.append(play(tmp_path, scenario, model=functions, tenants=()))
    assert marks == ["MISS", "HIT", "MISS", "HIT"]


@pytest.mark.parametrize(
    ("number", "least"), [(300, 10), pytest.param(1000, 150, marks=pytest.mark.more)]
)
def test_mixed_requests_get_no_wrong_answer(tmp_path, number, least):
    """Asks the double itself each time to compare."""

    async def scenario(gate, keys, app):
        rng = random.Random(14)
        hits = 0
        for _ in range(number):
            path = rng.choice(PATHS[:2])
            fields = ANSWERED | {
                "prompt": rng.choice("abc"),
                "messages": [{"role": "user", "content": rng.choice("abc")}],
                "max_tokens": rng.choice((1, 2)),
                "temperature": rng.choice((0, 0.0, 0, 0.7)),
                "stream": rng.random() < 0.5,
                "user": rng.choice("xyz"),
            }
            if rng.random() < 0.3:
                fields["seed"] = rng.choice((0, 1))
            if rng.random() < 0.3:
                name = rng.choice([*CHANGES])
                fields[name] = CHANGES[name]
                fields["messages"] = rng.choice((HELLO, fields["messages"]))
            tenant = rng.choice(("acme", "other"))
            reply = await ask(gate, path, fields, keys[tenant])
            assert reply.text() == text_of(fields), json.dumps(fields)
            hits += reply.x_cache == "HIT"
        assert hits > least and app.asked == number - hits

    play(tmp_path, scenario)
