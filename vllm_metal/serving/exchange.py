# SPDX-License-Identifier: Apache-2.0
"""One question to vLLM, and what is learnt from its answer while the client gets it."""

from __future__ import annotations

import asyncio

from vllm_metal.serving import cut_short, refusal, usage
from vllm_metal.serving.deadline import Deadline
from vllm_metal.serving.refusal import App, Message, Receive, Refusal, Scope, Send
from vllm_metal.serving.response_cache import replay
from vllm_metal.serving.response_cache.entry import Entry, Form
from vllm_metal.serving.routes import Style

_TOO_LATE = Refusal(504, "The request took longer than this server allows (timeout_s).")
_CUT_EVENT = b"data: " + _TOO_LATE.body() + b"\n\n"


class Exchange:
    """Carries a request to vLLM, and its answer to the client."""

    def __init__(
        self,
        body: bytes,
        deadline: Deadline,
        *,
        style: Style,
        x_cache: bytes | None = None,
        hide_usage: bool = False,
        record_bytes: int = 0,
    ) -> None:
        """Nothing is sent yet.

        Args:
            body: what vLLM gets.
            deadline: of the request.
            style: of the route.
            x_cache: value of the answer's header; None: it gets none.
            hide_usage: whether a stream's usage was asked for by the server alone.
            record_bytes: most bytes of an answer to remember; 0: none is.
        """
        self._body: bytes | None = body
        self._deadline, self._x_cache, self._hide_usage = deadline, x_cache, hide_usage
        self._room = record_bytes
        #: Of a response, whose status may have to be changed, the start waits for the first part.
        self._holds_start = style == "responses"
        self._held: Message | None = None
        self._parts: list[bytes] = []
        self._with_usage = b""
        self._status: int | None = None
        self._form: Form = "whole"
        self._complete = False
        self._let_go = False
        self._left = False

    async def run(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Asks, and returns when the client has the answer or has gone.

        Args:
            app: vLLM's.
            scope: for vLLM.
            receive: of the client, whose body has been read.
            send: of the client.
        """
        await app(scope, lambda: self._receive(receive), lambda message: self._send(message, send))
        if self._let_go and not self._complete:
            if self._status is None or self._held is not None:
                await refusal.answer(send, _TOO_LATE)
            else:
                event = _CUT_EVENT if self._form == "stream" else b""
                await send({"type": "http.response.body", "body": event})

    @property
    def ended(self) -> bool:
        """Whether vLLM has sent an answer to its end, and the client was there until then.

        To a client that has gone, vLLM sends a whole answer with nothing in it.
        """
        return self._complete and not self._left

    def entry(self) -> Entry | None:
        """The answer for others; None: it is an error, longer than allowed, or not whole."""
        if not self._complete or self._status != 200 or self._room <= 0:
            return None
        return Entry(self._form, b"".join(self._parts))

    def usage(self) -> usage.Usage | None:
        """Tokens that the answer says it took; None: it does not say."""
        return usage.last_in(self._with_usage)

    async def _receive(self, receive: Receive) -> Message:
        """The body, and then the end of the connection, or of the server's patience."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        client = asyncio.ensure_future(receive())
        cut = asyncio.ensure_future(self._deadline.cut.wait())
        try:
            await asyncio.wait((client, cut), return_when=asyncio.FIRST_COMPLETED)
            if client.done():
                message = client.result()
                self._left |= message["type"] == "http.disconnect" and not self._complete
                return message
        finally:
            client.cancel()
            cut.cancel()
        self._let_go = True
        return {"type": "http.disconnect"}

    async def _send(self, message: Message, send: Send) -> None:
        if self._let_go:  # vLLM answers somebody who has gone, as far as it knows
            return
        if message["type"] == "http.response.start":
            started = self._started(message)
            if self._holds_start:
                self._held = started
            else:
                await send(started)
        elif message["type"] == "http.response.body":
            await self._pass_on(message, send)
        else:
            await send(message)

    def _started(self, message: Message) -> Message:
        self._status = message["status"]
        headers = list(message.get("headers", ()))
        if any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers):
            self._form = "stream"
        if self._x_cache is not None:
            headers.append((b"x-cache", self._x_cache))
        return {**message, "headers": headers}

    async def _pass_on(self, message: Message, send: Send) -> None:
        part, more = message.get("body", b""), message.get("more_body", False)
        if self._holds_start:
            part = await self._corrected(part, send)
            message = {**message, "body": part}
        if usage.MARK in part:
            self._with_usage = part
        if self._room > 0:
            self._room -= len(part)
            self._parts.append(part)
            if self._room <= 0:
                self._parts.clear()
        self._complete = not more
        if self._hide_usage and self._form == "stream" and replay.is_usage(part):
            if more:
                return
            message = {**message, "body": b""}
        await send(message)

    async def _corrected(self, part: bytes, send: Send) -> bytes:
        """A part of a response as it has to be after its time was up; sends a start that waits."""
        written = cut_short.incomplete(part) if self._deadline.expired.is_set() else part
        if self._held is not None:
            start, self._held = self._held, None
            if len(written) != len(part):
                length = (b"content-length", b"%d" % len(written))
                kept = [pair for pair in start["headers"] if pair[0] != b"content-length"]
                start = {**start, "headers": [*kept, length]}
            await send(start)
        return written
