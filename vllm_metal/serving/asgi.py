# SPDX-License-Identifier: Apache-2.0
"""ASGI's types, and answers of our own that say no, in the form of vLLM's errors."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

from vllm_metal.vllm_patches.http_protocol import HANG_UP

#: ASGI's names of its parts (asgi.readthedocs.io, "ASGI Documentation").
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refusal(Exception):
    """A request is not served. The message goes to the client: nothing that it sent is in it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message

    def body(self) -> bytes:
        """JSON, as vLLM's errors have it."""
        error = {
            "message": self.message,
            "type": HTTPStatus(self.status).phrase,
            "param": None,
            "code": self.status,
        }
        return json.dumps({"error": error}).encode()


class Disconnected(Exception):
    """The client went away before its request was whole."""


async def answer(send: Send, refusal: Refusal, prefix: str = "http") -> None:
    """Sends a refusal as the answer.

    Args:
        send: of the connection.
        refusal: what to say.
        prefix: of the messages' types: "http", or "websocket.http" before a socket is accepted.
    """
    body = refusal.body()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    start = {"type": f"{prefix}.response.start", "status": refusal.status, "headers": headers}
    await send(start)
    await send({"type": f"{prefix}.response.body", "body": body})


def hang_up(scope: Scope) -> None:
    """Ends the connection now, whether or not the client reads; nothing where the server cannot."""
    if (found := scope.get("extensions", {}).get(HANG_UP)) is not None:
        found["call"]()
