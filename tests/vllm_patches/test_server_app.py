# SPDX-License-Identifier: Apache-2.0
"""What stands around a server's application: each function once, the last one outermost."""

import asyncio

import pytest
from fastapi import FastAPI
from vllm.entrypoints.launchers.api_server import entry

from vllm_metal.vllm_patches.server_app import around_servers


class Around:
    """Passes all on: it stays around the servers of this process."""

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
