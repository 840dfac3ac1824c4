# SPDX-License-Identifier: Apache-2.0
"""The two-server example: its proxy's requests, and all parts together."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from e2e.server import FORKED
from proxy import make_app
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "disaggregated" / "two_servers.py"
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class Server:
    """A server that records requests and answers with given data."""

    def __init__(self, answer: Response) -> None:
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self._answer = answer

    def client(self) -> httpx.AsyncClient:
        app = Starlette(
            routes=[Route(path, self._serve, methods=["POST"]) for path in (COMPLETIONS, CHAT)]
        )
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")

    async def _serve(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        return self._answer


def prefill_server(answer: Response | None = None) -> Server:
    return Server(answer or JSONResponse({"choices": [], "kv_transfer_params": PARAMS}))


def nobody() -> httpx.AsyncClient:
    """A client of a missing server."""

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    return httpx.AsyncClient(transport=httpx.MockTransport(refuse), base_url="http://nobody")


def ask(
    prefill: httpx.AsyncClient,
    decode: httpx.AsyncClient,
    body: dict,
    path: str = COMPLETIONS,
    **headers: str,
) -> httpx.Response:
    """Returns the answer through the proxy."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(make_app([prefill], decode, shortest=0))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_prefill_makes_one_token_and_decode_gets_what_it_said(path: str) -> None:
    prefill, decode = prefill_server(), Server(JSONResponse({"text": "hi"}))
    body = {
        "model": "m",
        "prompt": "a",
        "temperature": 0.5,
        "max_tokens": 20,
        "min_tokens": 3,
        "max_completion_tokens": 20,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reply = ask(prefill.client(), decode.client(), body, path, authorization="Bearer x")
    assert reply.json() == {"text": "hi"}
    assert prefill.bodies == [
        {
            "model": "m",
            "prompt": "a",
            "temperature": 0.5,
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
    ]
    assert decode.bodies == [body | {"kv_transfer_params": PARAMS}]
    assert [seen[0]["authorization"] for seen in (prefill.headers, decode.headers)] == [
        "Bearer x"
    ] * 2


@pytest.mark.parametrize(
    "answer",
    [
        Response(status_code=500),
        JSONResponse({"error": "full"}, 503),
        Response("no JSON"),
        JSONResponse({"choices": []}),
    ],
)
def test_a_prefill_server_that_fails_is_done_without(answer: Response) -> None:
    decode = Server(JSONResponse({"text": "hi"}))
    body = {"prompt": "a", "max_tokens": 20}
    assert ask(prefill_server(answer).client(), decode.client(), body).json() == {"text": "hi"}
    assert decode.bodies == [body]


def test_no_prefill_server_is_done_without() -> None:
    decode = Server(JSONResponse({"text": "hi"}))
    assert ask(nobody(), decode.client(), {"prompt": "a"}).status_code == 200
    assert decode.bodies == [{"prompt": "a"}]


def test_an_error_of_the_decode_server_is_passed_on() -> None:
    decode = Server(JSONResponse({"error": {"message": "too long"}}, 400))
    reply = ask(prefill_server().client(), decode.client(), {"prompt": "a"})
    assert (reply.status_code, reply.json()) == (400, {"error": {"message": "too long"}})


def test_without_a_decode_server_there_is_an_error_that_says_so() -> None:
    reply = ask(prefill_server().client(), nobody(), {"prompt": "a"})
    assert reply.status_code == 502
    assert "decode server" in reply.json()["error"]["message"]


def test_a_stream_is_passed_on_as_it_is() -> None:
    lines = [f"data: {json.dumps({'n': n})}\n\n" for n in range(5)] + ["data: [DONE]\n\n"]
    decode = Server(StreamingResponse(iter(lines), media_type="text/event-stream"))
    reply = ask(prefill_server().client(), decode.client(), {"prompt": "a", "stream": True})
    assert reply.text == "".join(lines)
    assert reply.headers["content-type"].startswith("text/event-stream")


@pytest.mark.heavy
@pytest.mark.slow
def test_two_servers_and_the_proxy_together() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--characters", "1500"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | FORKED,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The texts are equal." in done.stdout
