# SPDX-License-Identifier: Apache-2.0
"""The header of responses, with a fake vLLM application."""

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from vllm_metal.serving.prefix_misses.explain import Miss
from vllm_metal.serving.prefix_misses.header import NAME, MissHeader, value
from vllm_metal.serving.prefix_misses.watch import EXCHANGE

MISS = Miss("date", 0, 5120, 37, 0, "system", before='Say "ü" 100%\n', now="x" * 100)
CHAT = "/v1/chat/completions"
ANSWER = {"answer": 1, "usage": {"prompt_tokens": 9}}


async def answer(request):
    body = await request.json()

    async def parts():
        if body.get("miss"):
            EXCHANGE.get().miss = MISS
        yield 'data: {"usage": {}}\n\n'
        EXCHANGE.get().miss = None  # too late to say anything else
        yield "data: two\n\n"

    if body.get("stream"):
        return StreamingResponse(parts(), media_type="text/event-stream")
    EXCHANGE.get().miss = MISS if body.get("miss") else None
    whole = JSONResponse(ANSWER, body.get("status", 200))
    if body.get("pieces"):
        pieces = (whole.body[:7], whole.body[7:], b"")
        return StreamingResponse(iterated(pieces), 200, whole.headers)
    return whole


async def iterated(pieces):
    for piece in pieces:
        yield piece


async def models(request):
    assert EXCHANGE.get() is None
    return JSONResponse([])


@pytest.fixture
def client():
    routes = [Route(CHAT, answer, methods=["POST"]), Route("/v1/models", models)]
    transport = httpx.ASGITransport(MissHeader(Starlette(routes=routes)))
    return httpx.AsyncClient(transport=transport, base_url="http://server")


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_why_its_prompt_was_missed(client, stream):
    reply = await client.post(CHAT, json={"stream": stream, "miss": True})
    assert reply.headers[NAME] == 'date; cached=0; lost=5120; token=37; message=0; role="system"'
    assert reply.text.endswith("two\n\n" if stream else "}")
    reply = await client.post(CHAT, json={"stream": stream})
    assert NAME not in reply.headers


@pytest.mark.asyncio
async def test_the_text_comes_to_who_asks_for_it(client):
    reply = await client.post(CHAT, json={"miss": True}, headers={NAME: "text"})
    said = reply.headers[NAME]
    assert r'; before=%"Say %22%c3%bc%22 100%25%0a"' in said
    assert f'; now=%"{"x" * 80}"' in said


@pytest.mark.asyncio
@pytest.mark.parametrize("asked", ["usage", "text"])
async def test_the_usage_has_it_for_who_sends_the_header(client, asked):
    reply = await client.post(CHAT, json={"miss": True}, headers={NAME: asked})
    details = reply.json()["usage"]["prompt_tokens_details"]
    assert details["prefix_cache_miss"]["token"] == 37
    assert int(reply.headers["content-length"]) == len(reply.content)
    assert "2026" not in reply.text
    reply = await client.post(CHAT, json={"miss": True, "stream": True}, headers={NAME: asked})
    assert '"prefix_cache_miss":{"cause":"date"' in reply.text
    assert reply.text.endswith("two\n\n")
    reply = await client.post(CHAT, json={"miss": True})
    assert reply.json() == ANSWER


@pytest.mark.asyncio
async def test_an_answer_in_pieces_has_its_length(client):
    reply = await client.post(CHAT, json={"miss": True, "pieces": True}, headers={NAME: "usage"})
    assert "prompt_tokens_details" in reply.json()["usage"]
    assert int(reply.headers["content-length"]) == len(reply.content)


@pytest.mark.asyncio
async def test_an_error_is_left_as_it_is(client):
    reply = await client.post(CHAT, json={"miss": True, "status": 500}, headers={NAME: "usage"})
    assert (reply.status_code, reply.json()) == (500, ANSWER)


@pytest.mark.asyncio
async def test_other_routes_are_left_alone(client):
    assert (await client.get("/v1/models")).json() == []


def test_what_is_not_known_is_not_said():
    assert value(Miss("first_seen", 16, 100)) == "first_seen; cached=16; lost=100"
    assert value(Miss("edit", 0, 99, 1, 2, 'us"er\r\n')).endswith('; role="user"')
