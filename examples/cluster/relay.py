# SPDX-License-Identifier: Apache-2.0
"""Sends a request to replicas until one has answered, and passes its answer on.

A request may be sent again as long as nobody has seen a byte of its answer: to another replica
where one died, or takes no requests now (503). A stream that breaks off afterwards ends with an
event that says so, which the clients of OpenAI and Anthropic raise as an error. Nothing here knows
of Ray.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace

TRIES = 4  # a request that ends whatever serves it must not end all replicas
PAUSE_S = 0.1  # before the first repeat, and twice as long before each further one
BUSY = 503
_NEVER_BEGAN = "No server could answer this request."
_BROKE_OFF = "The server ended before its answer was complete. Nothing of it was kept; ask again."


class Gone(Exception):
    """A replica is not there any more, or has ended amid a request."""


@dataclass(frozen=True)
class Asked:
    """A request, as the client sent it.

    Attributes:
        method: of HTTP.
        target: path, and query where there is one.
        headers: (name, value), without those that concern one connection only.
        body: all of it.
        avoid: names of replicas that were asked before, and did not answer.
    """

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Head:
    """What an answer begins with.

    Attributes:
        replica: name of the replica that answers.
        status: of HTTP.
        headers: (name, value), without those that concern one connection only.
    """

    replica: str
    status: int
    headers: tuple[tuple[str, str], ...]

    @property
    def streams(self) -> bool:
        """Whether events follow, which clients read as they come."""
        types = [value for name, value in self.headers if name.lower() == "content-type"]
        return any(value.startswith("text/event-stream") for value in types)


@dataclass(frozen=True)
class Answer:
    """An answer whose first byte is there: the whole of it, or events that go on coming."""

    head: Head
    body: bytes | AsyncIterator[bytes]


#: Sends a request to one replica: the head of its answer comes first, then its body in pieces.
#: Raises Gone, at any point.
Send = Callable[[Asked], AsyncIterator[Head | bytes]]


async def answer(send: Send, asked: Asked) -> Answer:
    """The answer of the first replica that has one.

    Args:
        send: asks one replica, where it can none of `asked.avoid`.
        asked: the request.

    Returns:
        Its head, and a body that raises nothing. Where all that were asked take no requests, the
        last refusal, whose Retry-After tells the client when; where all ended, status 502.
    """
    for attempt in range(TRIES):
        if attempt:
            await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
        try:
            found = await _first_byte(send(asked))
        except Gone:
            continue
        if found.head.status != BUSY or found.head.replica in asked.avoid:
            return found  # an answer, or there is nobody else to ask
        asked = replace(asked, avoid=asked.avoid | {found.head.replica})
    if asked.avoid:
        return found
    return refusal(502, _NEVER_BEGAN)


def refusal(status: int, message: str) -> Answer:
    """An error of this program's own, in the server's form."""
    body = json.dumps(error(status, message)).encode()
    return Answer(Head("", status, (("content-type", "application/json"),)), body)


def error(status: int, message: str) -> dict[str, object]:
    """What OpenAI's and Anthropic's clients both read as an error."""
    fields = {"type": "api_error", "message": message, "param": None, "code": status}
    return {"type": "error", "error": fields}


async def _first_byte(answered: AsyncIterator[Head | bytes]) -> Answer:
    """Waits for an answer's first byte; for all of it where it is no stream of events."""
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
    """A stream by whole events, and one more where it breaks off."""
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
