# SPDX-License-Identifier: Apache-2.0
"""A server's lines once it is ready, by its options."""

import json
import shlex
from argparse import Namespace

import pytest

from vllm_metal.serving import ready

DEFAULTS = {"uds": None, "host": None, "port": 8000, "ssl_certfile": None, "api_key": None}


@pytest.mark.parametrize(
    ("options", "address", "is_open"),
    [
        ({}, "http://127.0.0.1:8000", True),
        ({"host": "0.0.0.0", "port": 80}, "http://127.0.0.1:80", True),
        ({"host": "127.0.0.1"}, "http://127.0.0.1:8000", False),
        ({"host": "::1"}, "http://[::1]:8000", False),
        ({"host": "localhost", "ssl_certfile": "a.pem"}, "https://localhost:8000", False),
        ({"host": "mac.local"}, "http://mac.local:8000", True),
        ({"api_key": ["secret"]}, "http://127.0.0.1:8000", False),
        ({"uds": "/tmp/a.sock"}, "unix:/tmp/a.sock", False),
    ],
)
def test_where_a_server_is_and_who_can_use_it(options, address, is_open, monkeypatch):
    for name in ("VLLM_API_KEY", "VLLM_METAL_SERVING_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    args = Namespace(**(DEFAULTS | options))
    assert (ready.address(args), ready.is_open(args)) == (address, is_open)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert not ready.is_open(args)


@pytest.mark.parametrize("route", ["chat/completions", "completions", "embeddings"])
@pytest.mark.parametrize("where", ["http://127.0.0.1:8000", "unix:/tmp/a.sock"])
def test_the_request_to_try_is_one_that_a_shell_takes(route, where):
    said, command = ready.lines(where, "it's a model", 8192, route)
    assert said == f"vllm-metal: serves it's a model at {where} (context 8,192 tokens). Try:"
    words = shlex.split(command)
    assert words[0] == "curl" and any(word.endswith(f"/v1/{route}") for word in words)
    assert json.loads(words[-1])["model"] == "it's a model"
    assert ("--unix-socket" in words) == where.startswith("unix")
