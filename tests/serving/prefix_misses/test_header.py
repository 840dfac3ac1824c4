# SPDX-License-Identifier: Apache-2.0
"""The header on answers, behind an application that answers as vLLM does."""

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


async def answer(request):
    body = await request.json()

    async def parts():
        if body.get("miss"):
            EXCHANGE.get().miss = MISS
        yield "data: one\n\n"
        EXCHANGE.get().miss = None  # too late to say anything else
        yield "data: two\n\n"

    if body.get("stream"):
        return StreamingResponse(parts(), media_type="text/event-stream")
    EXCHANGE.get().miss = MISS if body.get("miss") else None
    return JSONResponse({"answer": 1})


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
async def test_other_routes_are_left_alone(client):
    assert (await client.get("/v1/models")).json() == []


def test_what_is_not_known_is_not_said():
    assert value(Miss("first_seen", 16, 100)) == "first_seen; cached=16; lost=100"
    assert value(Miss("edit", 0, 99, 1, 2, 'us"er\r\n')).endswith('; role="user"')
