# SPDX-License-Identifier: Apache-2.0
"""A server fails if its engine has died, and rejects requests during shutdown."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from patches.vllm_patches.doubles import DeadEngine, serve_until_it_ends
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_metal.patches.vllm_patches.server_end import RETRY_AFTER_S, TurnAway, set_server_exit

NEW = [("GET", "/health"), ("POST", "/v1/completions"), ("POST", "/v1/responses")]
OLD = [("GET", "/metrics"), ("GET", "/v1/responses/a"), ("POST", "/v1/responses/a/cancel")]

set_server_exit()


def test_a_server_without_its_engine_fails():
    with pytest.raises(SystemExit) as ended:
        asyncio.run(serve_until_it_ends(DeadEngine()))
    assert ended.value.code == 1


def test_a_server_that_was_told_to_stop_does_not():
    engine = DeadEngine()
    engine.told_to_stop = True
    asyncio.run(serve_until_it_ends(engine))


@pytest.mark.parametrize("died", [True, False])
def test_an_engine_notes_that_it_was_told(died):
    core = SimpleNamespace(
        resources=SimpleNamespace(engine_dead=died), shutdown=lambda timeout: None
    )
    engine = AsyncLLM.__new__(AsyncLLM)
    engine.engine_core, engine.output_handler, engine.renderer = core, None, None
    engine.shutdown(timeout=0)
    assert engine.told_to_stop is not died


def test_an_engine_that_was_never_whole_ends_without_another_error():
    """vLLM's `__del__` shuts it down, and its error would hide the failed start's."""
    engine = AsyncLLM.__new__(AsyncLLM)
    engine.shutdown()
    assert not engine.told_to_stop


def application(stopping):
    app = FastAPI()
    for method, path in (*NEW, *OLD):
        app.api_route(path, methods=[method])(lambda: "served")
    app.add_middleware(TurnAway, is_stopping=lambda: stopping)
    return app


def ask(app, method, path):
    async def asked():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return await client.request(method, path)

    return asyncio.run(asked())


@pytest.mark.parametrize(("method", "path"), NEW)
def test_a_server_that_stops_turns_requests_away(method, path):
    assert ask(application(False), method, path).text == '"served"'
    reply = ask(application(True), method, path)
    assert reply.status_code == 503 and reply.headers["retry-after"] == str(RETRY_AFTER_S)
    assert reply.headers["connection"] == "close"
    assert "stopping" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), OLD)
def test_figures_and_what_was_begun_may_be_asked_for(method, path):
    assert ask(application(True), method, path).text == '"served"'
