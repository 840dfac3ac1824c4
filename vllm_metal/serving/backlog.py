# SPDX-License-Identifier: Apache-2.0
"""Backlog: parts of an answer that a client has not taken yet.

An answer that others wait for too must not wait for the client that asked first: one that does not
read would hold all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import Message, Send


class Backlog:
    """Sends messages to a client in a task of its own; it belongs to one event loop."""

    def __init__(self, send: Send, max_bytes: int) -> None:
        """Nothing is sent yet.

        Args:
            send: of the client.
            max_bytes: that may wait for the client before `put` does.
        """
        self._send, self._max_bytes = send, max_bytes
        self._waiting: deque[Message] = deque()
        self._bytes = 0
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def put(self, message: Message) -> None:
        """Takes a message.

        Raises:
            Exception: what sending an earlier one has raised.
        """
        self._waiting.append(message)
        self._bytes += len(message.get("body", b""))
        if self._task is None or self._task.done():
            await self.empty()  # raises what the last one has
            self._task = asyncio.create_task(self._work())
        while self._bytes > self._max_bytes and not self._task.done():
            self._room.clear()
            await self._room.wait()

    async def empty(self) -> None:
        """Waits until the client has all; cancelled, it lets go of what is left.

        Raises:
            Exception: what sending has raised.
        """
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
