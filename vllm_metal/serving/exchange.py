# SPDX-License-Identifier: Apache-2.0
"""Exchange: forwards a request to vLLM and its response to the client, and records the response."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_metal.patches.vllm_patches.http_protocol import HANG_UP
from vllm_metal.serving.backlog import Backlog
from vllm_metal.serving.deadline import Deadline, incomplete
from vllm_metal.serving.refusal import Refusal
from vllm_metal.serving.response_cache.entry import Entry, Form
from vllm_metal.serving.routes import Style

_TOO_LATE = Refusal(504, "The request took longer than this server allows (timeout_s).")
_CUT_EVENT = b"data: " + bytes(_TOO_LATE.response().body) + b"\n\n"
_END_S = 1.0  # time for a client that was cut off to read the error


class Exchange:
    """One request to vLLM and its response."""

    def __init__(
        self,
        body: bytes,
        deadline: Deadline,
        *,
        style: Style,
        x_cache: str | None,
        record_bytes: int,
        on_too_long: Callable[[], None] | None,
    ) -> None:
        """
        Args:
            body: body to send to vLLM.
            x_cache: value of the response's X-Cache header; None: no such header.
            record_bytes: most bytes of a response to record and to buffer for a slow client; 0:
                nothing is recorded, and vLLM waits for the client.
            on_too_long: called when a response is longer than `record_bytes`; None: no call.
        """
        self._body: bytes | None = body
        self._deadline, self._x_cache, self._style = deadline, x_cache, style
        self._bytes_left, self._on_too_long = record_bytes, on_too_long
        self._record_bytes = record_bytes
        #: Start of the response, held until its first part, as the status may still become 504.
        self._held: Message | None = None
        self._parts: list[bytes] = []
        self._status: int | None = None
        self._form: Form = "whole"
        self._complete = False
        self._cut_off = False
        self._client_left = False
        self._backlog: Backlog | None = None
        self._send_on: Send

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards the request; returns when vLLM has responded or the client has gone.

        The client's body must have been read from `receive`.
        """
        self._scope, self._send_on = scope, send
        if self._record_bytes:
            self._backlog = Backlog(send, self._record_bytes)
            self._send_on = self._backlog.put
        await self._until_cut(app(scope, lambda: self._receive(receive), self._send))
        if self._cut_off and not self._complete:
            await self._until_cut(self._end_early(receive))

    async def deliver(self) -> None:
        """Waits until the client has the whole response, or the deadline cuts the connection."""
        if self._backlog is not None:
            await self._until_cut(self._backlog.empty())

    async def _end_early(self, receive: Receive) -> None:
        if self._status is None or self._held is not None:
            await _TOO_LATE.response()(self._scope, receive, self._send_on)
        else:
            event = _CUT_EVENT if self._form == "stream" else b""
            await self._send_on({"type": "http.response.body", "body": event})

    async def _until_cut(self, work: Awaitable[None]) -> None:
        """Awaits `work`, which sends to the client; at the deadline, closes the connection."""
        if not self._deadline.limited:
            await work
            return
        sending = asyncio.ensure_future(work)
        try:
            await asyncio.wait((sending, self._deadline.cut), return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                await asyncio.wait((sending,), timeout=_END_S)
            if sending.done():
                sending.result()
            else:
                if (extension := self._scope.get("extensions", {}).get(HANG_UP)) is not None:
                    extension["call"]()  # the connection ends, whether or not the client reads
                await asyncio.sleep(0)  # lets the server notice that the connection has ended
        finally:
            sending.cancel()

    @property
    def ended(self) -> bool:
        """Whether vLLM completed the response while the client was connected.

        If the client has gone, vLLM sends a complete but empty response, which does not count.
        """
        return self._complete and not self._client_left

    def entry(self) -> Entry | None:
        """Returns the recorded response; None if it is an error, too long, or incomplete."""
        if not self._complete or self._status != 200 or self._bytes_left <= 0:
            return None
        return Entry(self._form, b"".join(self._parts))

    async def _receive(self, receive: Receive) -> Message:
        """Gives vLLM the body, then a disconnect when the client leaves or the time is up."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        client = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((client, self._deadline.cut), return_when=asyncio.FIRST_COMPLETED)
            if client.done():
                message = client.result()
                self._client_left |= message["type"] == "http.disconnect" and not self._complete
                return message
        finally:
            client.cancel()
        self._cut_off = True
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._cut_off:  # vLLM was told that the client has gone, but still sends
            return
        if message["type"] == "http.response.start":
            self._held = self._started(message)
        elif message["type"] == "http.response.body":
            await self._pass_on(message)
        else:
            await self._send_on(message)

    def _started(self, message: Message) -> Message:
        self._status = message["status"]
        headers = MutableHeaders(raw=list(message.get("headers", ())))
        if headers.get("content-type", "").startswith("text/event-stream"):
            self._form = "stream"
        if self._x_cache is not None:
            headers["x-cache"] = self._x_cache
        return {**message, "headers": headers.raw}

    async def _pass_on(self, message: Message) -> None:
        if self._held is not None and self._has_no_output():
            self._cut_off = True
            return
        part, more = message.get("body", b""), message.get("more_body", False)
        if self._style == "responses" and self._deadline.expired.done():
            part = self._corrected(part)
        if self._bytes_left > 0:
            self._record(part)
        self._complete = not more
        if self._held is not None:
            start, self._held = self._held, None
            await self._send_on(start)
        await self._send_on({**message, "body": part})

    def _has_no_output(self) -> bool:
        # vLLM answers some aborted requests with a status of 5xx.
        failed = self._status is not None and self._status >= 500
        return self._deadline.aborted_before_output or (failed and self._deadline.expired.done())

    def _record(self, part: bytes) -> None:
        self._bytes_left -= len(part)
        self._parts.append(part)
        if self._bytes_left <= 0:
            self._parts.clear()
            if self._on_too_long is not None:
                self._on_too_long()

    def _corrected(self, part: bytes) -> bytes:
        """Corrects the status in a part of a response, if the deadline ended the response."""
        written = incomplete(part)
        if self._held is not None and len(written) != len(part):
            MutableHeaders(raw=self._held["headers"])["content-length"] = str(len(written))
        return written
