# SPDX-License-Identifier: Apache-2.0
"""What stands around a server's application: each function once, the last one outermost."""

import asyncio
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from vllm.entrypoints.launchers.api_server import entry

from vllm_metal.vllm_patches import server_app


@pytest.fixture
def served(monkeypatch):
    """What vLLM's function is called with that serves."""
    calls = []

    async def serve_http(app, *args, **options):
        calls.append(app.middleware_stack)

    monkeypatch.setattr(entry, "serve_http", serve_http)
    monkeypatch.setattr(server_app, "_WRAPS", [])
    return calls


@pytest.mark.parametrize("built", [True, False])
def test_two_functions_are_both_around_a_server(served, built):
    def wrapping(name):
        return lambda stack, state: SimpleNamespace(inner=stack, name=name, state=state)

    first, second = wrapping("first"), wrapping("second")
    for wrap in (first, second, first):
        server_app.around_servers(wrap)
    app = FastAPI()
    app.state.engine_client = None
    if built:
        app.middleware_stack = app.build_middleware_stack()
    asyncio.run(entry.serve_http(app))
    (outer,) = served
    assert (outer.name, outer.inner.name) == ("second", "first")
    assert outer.state is app.state
    assert callable(outer.inner.inner)
