# SPDX-License-Identifier: Apache-2.0
"""A command's server only answers its own client."""

import asyncio

import pytest
from serving_double import App, ask

from vllm_metal.serving.local_only import LocalOnly

KEY = "a-key-of-this-start"
#: Paths without a key in vLLM, paths with one, and paths that it lacks.
PATHS = ("/invocations", "/tokenize", "/detokenize", "/metrics", "/scale_elastic_ep", "/ping")
PATHS += ("/v1/models", "/v1/chat/completions", "/health/", "/healthy", "//health", "/docs", "/")
HOST = [(b"host", b"127.0.0.1:8000")]


@pytest.fixture
def guarded(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    app = App()
    return LocalOnly(app), app


def status(guarded, path, headers, method="POST", key=None, host=HOST):
    guard, app = guarded
    before = app.asked
    headers = [*headers, *(host or ())]
    reply = asyncio.run(ask(guard, path, {}, key, method=method, headers=headers))
    assert (reply.status == 200) == (app.asked > before)
    return reply.status


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["POST", "GET", "OPTIONS"])
def test_every_route_wants_the_key(guarded, path, method):
    assert status(guarded, path, [], method) == 401
    assert status(guarded, path, [], method, key="another") == 401
    assert status(guarded, path, [], method, key=KEY) == 200
    assert status(guarded, path, [(b"x-api-key", KEY.encode())], method) == 200


def test_health_wants_none(guarded):
    assert status(guarded, "/health", [], "GET") == 200
    assert status(guarded, "/health", [], "POST") == 401


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example", 403),
        ("", 403),
    ],
)
def test_the_host_is_this_machine(guarded, host, expected):
    """A page whose name resolves here has the same origin and needs no CORS."""
    for path, method in (("/health", "GET"), ("/v1/models", "POST")):
        headers = [(b"host", host.encode())]
        assert status(guarded, path, headers, method, KEY, host=None) == expected


def test_there_is_no_guard_without_a_key(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="VLLM_API_KEY"):
        LocalOnly(App())
