# SPDX-License-Identifier: Apache-2.0
"""Measures how long a generation request took and how it ended, as its client saw it.

vLLM's own histogram counts only completed requests, so timeouts make it look better.
"""

from __future__ import annotations

import time

from starlette.types import Message, Receive, Send

from vllm_metal.serving.metrics import Outcome, ServerMetrics


class Duration:
    """Wraps one request's `receive` and `send` to time it; passes all messages on unchanged."""

    def __init__(self, metrics: ServerMetrics, receive: Receive, send: Send) -> None:
        """Starts the clock. Create it when the body has been read."""
        self._metrics, self._receive, self._send = metrics, receive, send
        self._began = time.perf_counter()
        self._status: int | None = None
        self._is_hit = self._complete = self._client_left = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._client_left |= message["type"] == "http.disconnect" and not self._complete
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._is_hit = (b"x-cache", b"HIT") in message["headers"]
        await self._send(message)
        if message["type"] == "http.response.body":
            self._complete |= not message.get("more_body", False)

    def end(self, timed_out: bool, background: bool) -> None:
        """Records the request; `background`: whether the engine continues after the response."""
        outcome = self._outcome(timed_out, background)
        self._metrics.durations.labels(outcome).observe(time.perf_counter() - self._began)

    def _outcome(self, timed_out: bool, background: bool) -> Outcome:
        if timed_out:
            return "timed_out"
        if self._client_left:
            return "aborted"
        if not self._complete or self._status is None or self._status >= 400:
            return "error"
        if background:
            return "background"
        return "hit" if self._is_hit else "computed"
