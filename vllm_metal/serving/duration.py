# SPDX-License-Identifier: Apache-2.0
"""How long a request that generates took, and how it ended, as its client saw it.

vLLM's own histogram has only what the engine computed to the end: the more requests time out, the
better it looks.
"""

from __future__ import annotations

import time

from starlette.types import Message, Receive, Send

from vllm_metal.serving.metrics import Figures, Outcome


class Duration:
    """Watches one request; it changes no message."""

    def __init__(self, figures: Figures, receive: Receive, send: Send) -> None:
        """Begins to count: the request's body is there.

        Args:
            figures: that count.
            receive, send: of the client.
        """
        self._figures, self._receive, self._send = figures, receive, send
        self._began = time.perf_counter()
        self._status: int | None = None
        self._kept = self._complete = self._left = False

    async def receive(self) -> Message:
        """The client's next message."""
        message = await self._receive()
        self._left |= message["type"] == "http.disconnect" and not self._complete
        return message

    async def send(self, message: Message) -> None:
        """Sends a message to the client."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._kept = (b"x-cache", b"HIT") in message["headers"]
        await self._send(message)
        if message["type"] == "http.response.body":
            self._complete |= not message.get("more_body", False)

    def end(self, timed_out: bool, background: bool) -> None:
        """Counts the request.

        Args:
            timed_out: its time limit has ended it.
            background: the engine goes on after the answer.
        """
        outcome = self._outcome(timed_out, background)
        self._figures.durations.labels(outcome).observe(time.perf_counter() - self._began)

    def _outcome(self, timed_out: bool, background: bool) -> Outcome:
        if timed_out:
            return "timed_out"
        if self._left:
            return "aborted"
        if not self._complete or self._status is None or self._status >= 400:
            return "error"
        if background:
            return "background"
        return "hit" if self._kept else "computed"
