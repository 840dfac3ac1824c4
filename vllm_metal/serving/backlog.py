# SPDX-License-Identifier: Apache-2.0
"""Backlog: parts of a response that a client has not read yet.

Coalesced requests wait for the response to the first of them. That response must not wait for the
first client to read it, since a slow client would block all others.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Message, Send


class Backlog:
    """Sends messages to a client in its own task. Belongs to one event loop."""

    def __init__(self, send: Send, max_bytes: int) -> None:
        """`put` blocks while more than `max_bytes` are queued."""
        self._send, self._max_bytes = send, max_bytes
        self._waiting: deque[Message] = deque()
        self._bytes = 0
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def put(self, message: Message) -> None:
        """Queues a message; raises the error with which sending an earlier one failed."""
        self._waiting.append(message)
        self._bytes += len(message.get("body", b""))
        if self._task is None or self._task.done():
            await self.empty()  # raises the last task's exception
            self._task = asyncio.create_task(self._work())
        while self._bytes > self._max_bytes and not self._task.done():
            self._room.clear()
            await self._room.wait()

    async def empty(self) -> None:
        """Waits until all is sent; raises if sending fails. If cancelled, drops unsent messages."""
        if self._task is not None:
            await self._task

    async def _work(self) -> None:
        try:
            while self._waiting:
                message = self._waiting.popleft()
                await self._send(message)
                self._bytes -= len(message.get("body", b""))
                self._room.set()
        finally:
            self._room.set()
