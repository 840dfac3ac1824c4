# SPDX-License-Identifier: Apache-2.0
"""Tells a client in a header why its prompt was not found in the prefix cache.

    Prefix-Cache-Miss: date; cached=0; lost=5120; token=37; message=0; role="system"

It is an item with parameters (RFC 9651). A client that sends `Prefix-Cache-Miss: text` gets what
stood there before and what stands there now, too: of its own prompts.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_metal.serving import routes
from vllm_metal.serving.prefix_misses.explain import Miss
from vllm_metal.serving.prefix_misses.watch import EXCHANGE, Exchange

NAME = "prefix-cache-miss"
_MOST_TEXT = 80  # characters


class MissHeader:
    """Holds the start of an answer until its first part is there, as the miss is known then."""

    def __init__(self, app: ASGIApp) -> None:
        """Takes the application that answers."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _generates(scope):
            await self._app(scope, receive, send)
            return
        exchange = Exchange()
        with_text = Headers(scope=scope).get(NAME, "").strip().lower() == "text"
        held: list[Message] = []

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                held.append(message)
                return
            if held:
                start = held.pop()
                if exchange.miss is not None:
                    headers = MutableHeaders(raw=list(start.get("headers", ())))
                    headers[NAME] = value(exchange.miss, with_text)
                    start = {**start, "headers": headers.raw}
                await send(start)
            await send(message)

        token = EXCHANGE.set(exchange)
        try:
            await self._app(scope, receive, send_on)
        finally:
            EXCHANGE.reset(token)


def value(miss: Miss, with_text: bool = False) -> str:
    """The header's value.

    Args:
        miss: of the prompt.
        with_text: whether to say what differs, in display strings of 80 characters at most.
    """
    parts = [miss.cause, f"cached={miss.cached}", f"lost={miss.lost}"]
    parts += [f"token={miss.token}"] * (miss.token is not None)
    parts += [f"message={miss.message}"] * (miss.message is not None)
    parts += [f'role="{_ascii(miss.role or "")}"'] * bool(miss.role)
    if with_text:
        texts = ("before", miss.before), ("now", miss.now)
        parts += [f'{name}=%"{_display(text)}"' for name, text in texts if text]
    return "; ".join(parts)


def _generates(scope: Scope) -> bool:
    match = routes.find(scope["method"], scope["path"])
    return match is not None and match.route.style is not None


def _display(text: str) -> str:
    """The inside of a display string: all but letters of ASCII, and % and ", is escaped."""
    plain = range(0x20, 0x7F)
    return "".join(
        chr(byte) if byte in plain and chr(byte) not in '%"' else f"%{byte:02x}"
        for byte in text[:_MOST_TEXT].encode()
    )


def _ascii(text: str) -> str:
    """The inside of a string: a role is a word."""
    return "".join(char for char in text if char.isascii() and (char.isalnum() or char in "_-"))
