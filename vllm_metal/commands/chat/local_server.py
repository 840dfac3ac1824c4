# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm serve` beside the page, on a loopback port and with a key that nobody else knows."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import httpx

from vllm_metal.device.child import LIMITS, Child, python

_HOST = "127.0.0.1"
_POLL = 0.25  # seconds
_MOST_LINES = 12  # of its log in an error


class DidNotStart(RuntimeError):
    """The server ended, or took too long; the message has the error, or the end of its log."""


@dataclass(frozen=True)
class LocalServer:
    """A server that answers, and ends with the block that started it."""

    url: str
    key: str
    process: Child


@contextmanager
def serving(
    model: str, max_model_len: int | None = None, kv_cache_gib: float | None = None
) -> Iterator[LocalServer]:
    """Runs a server for `model` until the block ends.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        max_model_len: tokens of context; None: what fits.
        kv_cache_gib: size of the KV cache; None: vLLM's default.

    Raises:
        DidNotStart: see there.
    """
    port, key = _free_port(), secrets.token_urlsafe()
    options = ["--host", _HOST, "--port", str(port), "--enable-prompt-tokens-details"]
    options += ["--max-model-len", str(-1 if max_model_len is None else max_model_len)]
    if kv_cache_gib is not None:
        options += ["--kv-cache-memory-bytes", str(int(kv_cache_gib * 2**30))]
    command = python("vllm.entrypoints.cli.main", "serve", model, *options)
    with Child(command, {"VLLM_API_KEY": key}) as child:
        _wait(child, port)
        try:
            yield LocalServer(f"http://{_HOST}:{port}", key, child)
        finally:
            child.interrupt()
            child.wait(LIMITS["shutting down"])


def _wait(child: Child, port: int) -> None:
    deadline = time.monotonic() + LIMITS["loading the model"]
    with httpx.Client(base_url=f"http://{_HOST}:{port}", trust_env=False) as client:
        while child.alive:
            with suppress(httpx.TransportError):  # no one listens yet
                if client.get("/health").status_code == 200:
                    return
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL)
    ended = child.ended(child.process.poll())
    lines = "\n".join(ended.lines[-_MOST_LINES:])
    raise DidNotStart(f"the server {ended.how}\n{lines}" if not ended.error else ended.error)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
