# SPDX-License-Identifier: Apache-2.0
"""A 503 if an engine cannot wake up, though vLLM has begun with 200."""

import asyncio
import json

import pytest

from vllm_metal.serving.idle.unavailable import CannotWake, Unavailable


def messages(app, kind="http"):
    """Returns the messages that `app` sends through `Unavailable`."""
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        await asyncio.Event().wait()

    scope = {"type": kind, "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(Unavailable(app)(scope, receive, send))
    return sent


async def begin(send, status=200):
    await send({"type": "http.response.start", "status": status, "headers": []})


async def part(send, body, more=True):
    await send({"type": "http.response.body", "body": body, "more_body": more})


def test_an_answer_goes_through_as_it_is():
    async def app(scope, receive, send):
        await begin(send, 201)
        await part(send, b"a")
        await part(send, b"b", more=False)

    start, *parts = messages(app)
    assert start["status"] == 201
    assert [message["body"] for message in parts] == [b"a", b"b"]


@pytest.mark.parametrize("in_a_task", [False, True])
def test_a_stream_whose_engine_cannot_wake_becomes_a_503(in_a_task):
    async def generate():
        raise CannotWake

    async def app(scope, receive, send):
        await begin(send)
        try:
            await (asyncio.create_task(generate()) if in_a_task else generate())
        except CannotWake as error:
            await part(send, f"data: {error}\n\n".encode())
        await part(send, b"data: [DONE]\n\n", more=False)

    start, body = messages(app)
    assert (start["status"], body.get("more_body", False)) == (503, False)
    error = json.loads(body["body"])["error"]
    assert error["code"] == 503 and "Try again later" in error["message"]


def test_the_next_request_knows_nothing_of_it():
    async def fails(scope, receive, send):
        CannotWake()
        await begin(send)
        await part(send, b"", more=False)

    async def works(scope, receive, send):
        await begin(send)
        await part(send, b"", more=False)

    assert messages(fails)[0]["status"] == 503
    assert messages(works)[0]["status"] == 200


def test_an_answer_that_has_begun_is_not_replaced():
    async def app(scope, receive, send):
        await begin(send)
        await part(send, b"a")
        CannotWake()
        await part(send, b"b", more=False)

    assert [message.get("body") for message in messages(app)] == [None, b"a", b"b"]


def test_other_connections_are_let_alone():
    async def app(scope, receive, send):
        await send({"type": "websocket.accept"})

    assert messages(app, "websocket") == [{"type": "websocket.accept"}]
