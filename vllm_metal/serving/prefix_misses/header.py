# SPDX-License-Identifier: Apache-2.0
"""Explains a prefix-cache miss to the client in a response header.

    Prefix-Cache-Miss: date; cached=0; lost=5120; token=37; message=0; role="system"

The header is an item with parameters (RFC 9651). A client that sends the header itself, such as
`Prefix-Cache-Miss: usage`, also gets the report in the usage of its responses. If it sends `text`,
the header also has the old and the new text, both from the client's own prompts.
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
    """Middleware that delays a response's start until its first part, when the miss is known.

    A stream of the Responses API begins earlier, so only its usage has the report.
    """

    def __init__(self, app: ASGIApp) -> None:
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
    def __init__(self, style: Style, requested: str | None, exchange: Exchange, send: Send) -> None:
        """`requested`: the client's header, if any; `exchange` gets the miss later."""
        self._style, self._requested, self._exchange, self._send = style, requested, exchange, send
        self._start: Message | None = None  # until it is sent
        self._writer: UsageWriter | None = None

    async def send(self, message: Message) -> None:
        """Sends a message to the client, after adding the report."""
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None and self._writer is None:
            self._add_header(self._start)
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

    def _add_header(self, start: Message) -> None:
        """Adds a known miss to the headers, and rewrites the usage if the client asked for it."""
        headers = MutableHeaders(raw=list(start.get("headers", ())))
        if (miss := self._exchange.miss) is not None:
            headers[NAME] = value(miss, (self._requested or "").strip().lower() == "text")
            self._start = {**start, "headers": headers.raw}
        if self._requested is not None and start["status"] == 200:
            streamed = headers.get("content-type", "").startswith("text/event-stream")
            self._writer = UsageWriter(self._style, self._exchange, streamed)


def value(miss: Miss, with_text: bool = False) -> str:
    """Returns the header's value; `with_text` adds both texts, up to 80 characters each."""
    parts = [miss.cause, f"cached={miss.cached}", f"lost={miss.lost}"]
    parts += [f"token={miss.token}"] * (miss.token is not None)
    parts += [f"message={miss.message}"] * (miss.message is not None)
    parts += [f'role="{_ascii(miss.role or "")}"'] * bool(miss.role)
    if with_text:
        texts = ("before", miss.before), ("now", miss.now)
        parts += [f'{name}=%"{_display(text)}"' for name, text in texts if text]
    return "; ".join(parts)


def _style(scope: Scope) -> Style | None:
    match = routes.find(scope["method"], scope["path"]) if scope["type"] == "http" else None
    return None if match is None else match.route.style


def _display(text: str) -> str:
    """Escapes %, " and everything but printable ASCII, as in RFC 9651's display strings."""
    plain = range(0x20, 0x7F)
    return "".join(
        chr(byte) if byte in plain and chr(byte) not in '%"' else f"%{byte:02x}"
        for byte in text[:_MOST_TEXT].encode()
    )


def _ascii(text: str) -> str:
    # Roles are words, so dropping other characters is simpler than escaping them.
    return "".join(char for char in text if char.isascii() and (char.isalnum() or char in "_-"))
