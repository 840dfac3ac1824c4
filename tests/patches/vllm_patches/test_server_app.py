# SPDX-License-Identifier: Apache-2.0
"""Applications around a server's: each once, the last one outermost."""

import asyncio
import http.client
import logging
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from patches.vllm_patches.test_http_protocol import LimitedHttp, running
from vllm.entrypoints.launchers.api_server import entry
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler

from vllm_metal.patches.vllm_patches.server_app import around_servers


class Around:
    """Passes everything on; it stays around this process's servers."""

    def __init__(self, inner, state, name):
        self.inner, self.state, self.name = inner, state, name

    async def __call__(self, scope, receive, send):
        await self.inner(scope, receive, send)


@pytest.mark.parametrize("built", [True, False])
def test_two_functions_are_both_around_a_server(monkeypatch, built):
    served = []

    async def serve_http(app, *args, **options):
        served.append(app.middleware_stack)

    def wrapping(name):
        return lambda stack, state: Around(stack, state, name)

    monkeypatch.setattr(entry, "serve_http", serve_http)
    first, second = wrapping("first"), wrapping("second")
    for wrap in (first, second, first):
        around_servers(wrap)
    app = FastAPI()
    app.state.engine_client = None
    if built:
        app.middleware_stack = app.build_middleware_stack()
    asyncio.run(entry.serve_http(app))
    (outer,) = served
    assert (outer.name, outer.inner.name) == ("second", "first")
    assert outer.state is app.state
    assert getattr(outer.inner.inner, "name", None) in (None, "second")  # of the other case


@pytest.fixture(params=[LimitedHttp, "h11"])
def failing_server(request, monkeypatch):
    """A connection to vLLM's application with routes that raise before and during answers."""

    async def serve_http(app, *args, **options):
        pass

    monkeypatch.setattr(entry, "serve_http", serve_http)
    around_servers(lambda stack, state: stack)
    app = FastAPI()
    app.state.args, app.state.engine_client = SimpleNamespace(log_error_stack=False), None
    init_exception_handler(app)

    @app.post("/raises")
    async def raises():
        raise RuntimeError("a fault")

    @app.post("/breaks")
    async def breaks():
        async def parts():
            yield "a part"
            raise RuntimeError("a fault")

        return StreamingResponse(parts())

    asyncio.run(entry.serve_http(app))
    with running(request.param, app) as (address, _):
        connection = http.client.HTTPConnection(*address, timeout=240)
        connection.auto_open = False  # no request may ask for a second one
        connection.connect()
        yield connection
        connection.close()


def test_a_connection_outlives_an_internal_error(failing_server, caplog, monkeypatch):
    log = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    caplog.set_level(logging.ERROR, log.name)
    for size in (0, 10**6):
        failing_server.request("POST", "/raises", b"b" * size)
        answer = failing_server.getresponse()
        assert (answer.status, answer.getheader("connection")) == (500, None)
        assert b"a fault" in answer.read()
    assert "RuntimeError" in caplog.text  # the first one's, with its traceback


def test_half_an_answer_ends_its_connection(failing_server):
    failing_server.request("POST", "/breaks")
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        failing_server.getresponse().read()
