# SPDX-License-Identifier: Apache-2.0
"""Sends a request to replicas until one answers, and forwards the answer.

A request may be retried as long as the client has received nothing: on another replica if one died
or is not accepting requests (503). A stream that breaks off later ends with an error event, which
the clients of OpenAI and Anthropic raise. This module does not depend on
Ray.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

TRIES = 4  # limits the damage of a request that crashes replicas
PAUSE_S = 0.1  # before the first retry; doubles each time
BUSY = 503
_NEVER_BEGAN = "No server could answer this request."
_BROKE_OFF = "The server ended before its answer was complete. Nothing of it was kept; ask again."


class Gone(Exception):
    """The replica is gone, or ended during a request."""


@dataclass(frozen=True)
class Asked:
    """A client's request.

    Attributes:
        method: HTTP method.
        target: path and query.
        headers: (name, value) pairs without hop-by-hop headers.
        body: complete body.
        avoid: names of replicas that were tried without success.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Head:
    """The start of an answer.

    Attributes:
        replica: name of the answering replica.
        status: HTTP status.
        headers: (name, value) pairs without hop-by-hop headers.
    """

    replica: str
    status: int
    headers: tuple[tuple[str, str], ...]

    @property
    def streams(self) -> bool:
        """Whether the body is an event stream, which clients read as it arrives."""
        types = [value for name, value in self.headers if name.lower() == "content-type"]
        return any(value.startswith("text/event-stream") for value in types)


@dataclass(frozen=True)
class Answer:
    """An answer with its first byte available: complete, or a running event stream."""

    head: Head
    body: bytes | AsyncIterator[bytes]


#: Sends a request to one replica; yields the head, then the body in pieces.
#: May raise Gone at any point.
Send = Callable[[Asked], AsyncIterator[Head | bytes]]


async def answer(send: Send, asked: Asked) -> Answer:
    """Returns the answer of the first replica that has one.

    Args:
        send: sends to one replica, if possible not in `asked.avoid`.
        asked: the request.

    Returns:
        The head, and a body that raises nothing. If all tried replicas reject the request, the
        last rejection with its Retry-After; if all ended, status 502.
    """
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
        try:
            found = await _first_byte(send(asked))
        except Gone:
            continue
        if found.head.status != BUSY or found.head.replica in asked.avoid:
            return found  # an answer, or no replica is left
        asked = replace(asked, avoid=asked.avoid | {found.head.replica})
    if asked.avoid:
        return found
    return refusal(502, _NEVER_BEGAN)


def refusal(status: int, message: str) -> Answer:
    """Returns an error of this program in the server's format."""
    body = json.dumps(error(status, message)).encode()
    return Answer(Head("", status, (("content-type", "application/json"),)), body)


def error(status: int, message: str) -> dict[str, object]:
    """Returns an error that the clients of both OpenAI and Anthropic understand."""
    fields = {"type": "api_error", "message": message, "param": None, "code": status}
    return {"type": "error", "error": fields}


async def _first_byte(answered: AsyncIterator[Head | bytes]) -> Answer:
    """Waits for the answer's first byte, or for all of it unless it is an event stream."""
    head = await anext(answered, None)
    if not isinstance(head, Head):
        raise Gone
    if not head.streams:
        pieces = [piece async for piece in answered if isinstance(piece, bytes)]
        return Answer(head, b"".join(pieces))
    first = await anext(answered, None)
    if not isinstance(first, bytes):
        raise Gone
    return Answer(head, _events(first, answered))


async def _events(first: bytes, answered: AsyncIterator[Head | bytes]) -> AsyncIterator[bytes]:
    """Yields whole events of a stream, and an error event if it breaks off."""
    rest = b""
    try:
        async for piece in _joined(first, answered):
            whole, end, rest = (rest + piece).rpartition(b"\n\n")
            if end:
                yield whole + end
    except Gone:
        event = json.dumps(error(502, _BROKE_OFF))
        yield f"event: error\ndata: {event}\n\n".encode()
    else:
        if rest:
            yield rest


async def _joined(first: bytes, answered: AsyncIterator[Head | bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in answered:
        if isinstance(piece, bytes):
            yield piece
