# SPDX-License-Identifier: Apache-2.0
"""Every output token is counted for its request's tenant."""

import asyncio
import random
from collections import Counter

import pytest
from serving_double import SECRET, App, ask, counted, identity, make

from vllm_metal.serving import meter, tenants_file
from vllm_metal.settings import salts

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
KINDS = ("prompt", "cached", "completion")


def tokens(gate, tenant):
    return [counted(gate, "vllm:tenant_tokens_total", tenant=tenant, kind=kind) for kind in KINDS]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("late_step", [False, True])
def test_tokens_of_a_request_whose_client_hangs_up_are_counted(tmp_path, stream, late_step):
    """Also those of a step that was running at the abort."""

    async def play():
        app, gone = App(gate=asyncio.Event()), asyncio.Event()
        gate, keys = make(app, tmp_path, cache=False)
        fields = CHAT | {"stream": stream}
        asked = asyncio.create_task(ask(gate, fields=fields, key=keys["acme"], gone=gone))
        while tokens(gate, "acme")[2] == 0:
            await asyncio.sleep(0.001)
        assert tokens(gate, "acme") == [5, 2, 1]
        if late_step:
            (name,) = app.engine.output_processor.external_req_ids
            await app.engine.abort([name])
        gone.set()
        await asked
        assert tokens(gate, "acme") == [5, 2, 3]

    asyncio.run(play())


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {"stream": True, "stream_options": {"include_usage": "false"}}),
        ("/v1/chat/completions", {"stream": "yes"}),
        ("/v1/responses", {"background": True}),
        ("/v1/messages", {}),
        ("/v1/completions", {"n": 1}),
    ],
)
def test_what_the_answer_says_of_usage_does_not_matter(tmp_path, path, more):
    gate, keys = make(App(), tmp_path, cache=False)
    asyncio.run(ask(gate, path, CHAT | more, keys["acme"]))
    assert tokens(gate, "acme") == [5, 2, 3] and tokens(gate, "other") == [0, 0, 0]


def test_requests_that_are_nobodys_are_not_counted(tmp_path):
    """They bypass the class: no salt, or one that it did not make."""
    app = App()
    gate, keys = make(app, tmp_path, cache=False)
    asyncio.run(ask(gate, fields=CHAT, key=keys["acme"]))
    for salt in (None, "", "acme", "vm1-" + "0" * 32, salts.derive(b"another secret", "acme")):
        request, _ = app.engine.begin("chatcmpl-x", salt)
        app.engine.say(request, 2, "stop")
    assert tokens(gate, "acme") == [5, 2, 3]


def test_steps_of_many_requests_that_come_end_and_are_aborted_in_any_order(tmp_path):
    app, rng, expected = App(), random.Random(7), Counter()
    gate, keys = make(app, tmp_path, cache=False)
    asyncio.run(ask(gate, fields=CHAT, key=keys["acme"]))
    asyncio.run(ask(gate, fields=CHAT, key=keys["other"]))
    expected.update(acme=3, other=3)
    running = []
    for number in range(400):
        tenant = rng.choice(("acme", "other"))
        who, mine = identity(gate, keys[tenant]), rng.choice(("", "a", "b"))
        salt = salts.derive(SECRET, who, mine)
        running.append((tenant, app.engine.begin(f"chatcmpl-{number}", salt)[0]))
        for _ in range(rng.randrange(3)):
            tenant, request = rng.choice(running)
            said, end = rng.randrange(1, 5), rng.choice((None, None, "stop"))
            app.engine.say(request, said, end)
            expected[tenant] += said
            if end is not None:
                running.remove((tenant, request))
            elif rng.random() < 0.3:  # a step that is under way still puts out tokens
                asyncio.run(app.engine.abort([request.external_req_id]))
    for tenant in ("acme", "other"):
        assert tokens(gate, tenant)[2] == expected[tenant]


def test_a_request_that_runs_is_counted_whatever_is_aborted_meanwhile(tmp_path, monkeypatch):
    """A client may abort many requests and continue one."""
    monkeypatch.setattr(meter, "MAX_ABORTED", 100)
    app = App()
    gate, keys = make(app, tmp_path, cache=False)
    asyncio.run(ask(gate, fields=CHAT, key=keys["acme"]))
    key, *_ = tenants_file.read(tmp_path / "tenants.json")
    salt = salts.derive(SECRET, key.identity)
    running, _ = app.engine.begin("chatcmpl-running", salt)
    for number in range(150):
        aborted, _ = app.engine.begin(f"chatcmpl-{number}", salt)
        app.engine.output_processor.abort_requests([f"chatcmpl-{number}"], internal=False)
    app.engine.say(aborted, 1)
    app.engine.say(running, 2, "stop")
    assert tokens(gate, "acme")[2] == 3 + 1 + 2
