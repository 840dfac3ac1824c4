# SPDX-License-Identifier: Apache-2.0
"""Chooses a prefill server for a prompt, or none.

A prompt goes to the prefill server with the earliest expected first token, based on past
measurements: its queued tokens, its prefill speed, and the decode server's time to fetch from it.
Prompts that the decode server is expected to compute as quickly by itself go
directly there.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

#: Shorter prompts are never sent to a prefill server: the overhead exceeds the gain.
SHORTEST_TOKENS = 256
#: Trusts the decode server's own prefill times up to this multiple of the longest prompt it has
#: computed. The limit grows with evidence, without a test of a long prompt.
REACH = 2.0
PAUSE_S = 10.0  # a failed prefill server rests this long, as a peer does in the engine
LONGEST_PREFILL_S = 600.0  # for a long prompt of a large model on a server without measurements
#: A prefill server may take this multiple of the expected time, plus this many seconds.
PATIENCE, PATIENCE_S = 4.0, 10.0
_UNANSWERED = 2  # consecutive unanswered probes after which a server is considered gone
_SAMPLES = 32


class Pace:
    """Duration by number of tokens: a line through recent measurements."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)

    def note(self, tokens: int, seconds: float) -> None:
        """Adds a measurement; ignores zero tokens."""
        if tokens > 0:
            self._seen.append((tokens, seconds))

    @property
    def longest(self) -> int:
        """The largest number of tokens measured; 0 if none."""
        return max((tokens for tokens, _ in self._seen), default=0)

    def seconds(self, tokens: int) -> float | None:
        """Returns the expected seconds for `tokens`; None without measurements."""
        if not self._seen:
            return None
        sizes, times = zip(*self._seen, strict=True)
        if len(set(sizes)) > 1:
            slope, start = statistics.linear_regression(sizes, times)
            if slope >= 0 and start >= 0:
                return start + slope * tokens
        return tokens * sum(times) / sum(sizes)


@dataclass
class Helper:
    """A prefill server and its measurements."""

    client: httpx.AsyncClient
    clock: Callable[[], float] = time.monotonic
    compute: Pace = field(default_factory=Pace)  # from the start of its turn to its reply
    fetch: Pace = field(default_factory=Pace)  # from then to the answer's first byte
    waiting: int = 0  # tokens of unfinished prompts
    requests: int = 0  # prompts computed
    tokens: int = 0  # tokens computed
    failures: int = 0
    _away_until: float = 0.0
    _last_done: float = 0.0
    _unanswered: int = 0
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_away(self) -> bool:
        return self._gone.is_set() or self.clock() < self._away_until

    def expected(self, tokens: int) -> float | None:
        """Returns the expected seconds until the reply to a prompt sent now; None if unknown."""
        return self.compute.seconds(self.waiting + tokens)

    def patience(self, tokens: int) -> float:
        """Returns the timeout for its reply in seconds."""
        expected = self.expected(tokens)
        if expected is None:
            return LONGEST_PREFILL_S
        return min(LONGEST_PREFILL_S, PATIENCE * expected + PATIENCE_S)

    def seen(self, answers: bool) -> None:
        """Records whether it answered a probe; after two failures, notifies waiting requests."""
        self._unanswered = 0 if answers else self._unanswered + 1
        if not self._unanswered:
            self._gone.clear()
        elif self._unanswered >= _UNANSWERED:
            self._gone.set()

    def rest(self) -> None:
        """Sends it no requests for a while; pending ones continue."""
        self._away_until = self.clock() + PAUSE_S

    def failed(self) -> None:
        """Counts a failure, and sends it no requests for a while."""
        self.failures += 1
        self.rest()

    async def post(self, path: str, body: dict, headers: dict, tokens: int) -> dict[str, Any]:
        """Returns its reply to a prompt.

        Raises:
            httpx.HTTPError: it failed or rejected the request.
            TimeoutError: it exceeded its timeout or went away.
            ValueError: the reply is not JSON.
        """
        limit, sent = self.patience(tokens), self.clock()
        reply = asyncio.ensure_future(self.client.post(path, json=body, headers=headers))
        gone = asyncio.ensure_future(self._gone.wait())
        self.waiting += tokens
        try:
            await asyncio.wait((reply, gone), timeout=limit, return_when="FIRST_COMPLETED")
        finally:
            self.waiting -= tokens
            gone.cancel()
            if not reply.done():
                reply.cancel()  # the server aborts the request
        if not reply.done():
            raise TimeoutError
        found = reply.result().raise_for_status().json()
        self._note(tokens, sent)
        return found

    def _note(self, tokens: int, sent: float) -> None:
        """Records a prompt's duration.

        A server computes prompts roughly one after another, so a prompt starts when it was sent
        or when the previous one finished, whichever is later.
        """
        done = self.clock()
        self.compute.note(tokens, done - max(sent, self._last_done))
        self._last_done = done
        self.requests += 1
        self.tokens += tokens

    def as_json(self) -> dict[str, Any]:
        """Returns its entry for the proxy's /status."""
        return {
            "url": str(self.client.base_url),
            "away": self.is_away,
            "waiting_tokens": self.waiting,
            "requests": self.requests,
            "tokens": self.tokens,
            "failures": self.failures,
            "seconds_to_compute_1000": self.compute.seconds(1000),
            "seconds_to_fetch_1000": self.fetch.seconds(1000),
        }


@dataclass
class Choice:
    """Chooses between several prefill servers and the decode server."""

    helpers: Sequence[Helper]
    shortest: int = SHORTEST_TOKENS
    alone: Pace = field(default_factory=Pace)  # the decode server's own prefills

    def order(self, tokens: int, new: int) -> list[Helper]:
        """Returns the prefill servers worth trying for a prompt, earliest expected reply first.

        Servers without measurements come first, by fewest queued tokens, so that each is tried. If
        empty, the decode server computes the prompt.

        Args:
            tokens: length of the prompt.
            new: tokens that the decode server has not cached.
        """
        if new < self.shortest:
            return []
        by_self = self._by_self(new)
        found = []
        for helper in self.helpers:
            if helper.is_away:
                continue
            computed, fetched = helper.expected(tokens), helper.fetch.seconds(new)
            if computed is None:
                found.append((-1.0, helper.waiting, helper))
            elif by_self is None or computed + (fetched or 0.0) < by_self:
                found.append((computed + (fetched or 0.0), helper.waiting, helper))
        return [helper for *_, helper in sorted(found, key=lambda each: each[:2])]

    def _by_self(self, tokens: int) -> float | None:
        """Returns the expected seconds for the decode server alone; None if unknown."""
        if tokens > REACH * self.alone.longest:
            return None
        return self.alone.seconds(tokens)
