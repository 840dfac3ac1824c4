# SPDX-License-Identifier: Apache-2.0
"""Tells a client in a header why its prompt was not found in the prefix cache.

    Prefix-Cache-Miss: date; cached=0; lost=5120; token=37; message=0; role="system"

It is an item with parameters (RFC 9651). A client that sends the header itself, as
`Prefix-Cache-Miss: usage`, gets the same in the usage of its answers. To one that sends `text` the
header also says what stood there before and what stands there now: of its own prompts.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_metal.patches.vllm_patches import prompts
from vllm_metal.serving import routes
from vllm_metal.serving.prefix_misses.explain import Miss
from vllm_metal.serving.prefix_misses.usage import UsageWriter
from vllm_metal.serving.prefix_misses.watch import EXCHANGE, Exchange
from vllm_metal.serving.routes import Style

NAME = "prefix-cache-miss"
_MOST_TEXT = 80  # characters


class MissHeader:
    """Holds the start of an answer until its first part is there, as the miss is known then.

    A stream of Responses begins before that: its usage alone says it.
    """

    def __init__(self, app: ASGIApp) -> None:
        """Takes the application that answers."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        style = _style(scope)
        if style is None:
            await self._app(scope, receive, send)
            return
        exchange = Exchange()
        answer = _Answer(style, Headers(scope=scope).get(NAME), exchange, send)
        prompts.begin_request()
        token = EXCHANGE.set(exchange)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            EXCHANGE.reset(token)


class _Answer:
    """One answer on its way to the client."""

    def __init__(self, style: Style, asked: str | None, exchange: Exchange, send: Send) -> None:
        """
        Args:
            style: of the route.
            asked: the header that the client sent; None: it sent none.
            exchange: has the miss once it is known.
            send: takes the answer.
        """
        self._style, self._asked, self._exchange, self._send = style, asked, exchange, send
        self._start: Message | None = None  # until it is sent
        self._writer: UsageWriter | None = None

    async def send(self, message: Message) -> None:
        """Takes a message of the application's."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None and self._writer is None:
            self._look(self._start)
        if (writer := self._writer) is not None:
            last = not message.get("more_body")
            message = {**message, "body": writer.write(message.get("body", b""), last)}
            if not (message["body"] or last):
                return  # the rest of an event, or of an object, is still to come
            if self._start is not None and not writer.streamed:
                headers = MutableHeaders(raw=list(self._start["headers"]))
                headers["content-length"] = str(len(message["body"]))
                self._start = {**self._start, "headers": headers.raw}
        if self._start is not None:
            await self._send(self._start)
            self._start = None
        await self._send(message)

    def _look(self, start: Message) -> None:
        """Puts what is known of the miss into the start, and has the usage say it if it shall."""
        headers = MutableHeaders(raw=list(start.get("headers", ())))
        if (miss := self._exchange.miss) is not None:
            headers[NAME] = value(miss, (self._asked or "").strip().lower() == "text")
            self._start = {**start, "headers": headers.raw}
        if self._asked is not None and start["status"] == 200:
            streamed = headers.get("content-type", "").startswith("text/event-stream")
            self._writer = UsageWriter(self._style, self._exchange, streamed)


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


def _style(scope: Scope) -> Style | None:
    """The style of a request that generates; None: it is another."""
    match = routes.find(scope["method"], scope["path"]) if scope["type"] == "http" else None
    return None if match is None else match.route.style


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
