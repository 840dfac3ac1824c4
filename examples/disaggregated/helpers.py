# SPDX-License-Identifier: Apache-2.0
"""Prefill servers: chooses the one that prefills a prompt, or none.

A prompt goes to the helper that is expected to bring the first token soonest, by what the proxy has
seen: how many tokens it waits for there, how long that helper takes to compute some, and how long
the server that answers takes to fetch them from it. A prompt that the server which answers is
expected to compute as soon goes straight there.
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

#: Prompts below this are never sent to a helper: two servers take longer to agree.
SHORTEST_TOKENS = 256
#: How far beyond the longest prompt that the server which answers has computed itself its time is
#: believed. So its share grows by evidence, and no long prompt is spent on finding out.
REACH = 2.0
PAUSE_S = 10.0  # a helper that failed is left alone for so long, as servers leave their peers
LONGEST_PREFILL_S = 600.0  # a long prompt of a large model, at a helper of which nothing is known
#: A helper may take so many times what is expected of it, and so many seconds more.
PATIENCE, PATIENCE_S = 4.0, 10.0
_UNANSWERED = 2  # looks in a row that went without an answer: it is gone
_SAMPLES = 32


class Pace:
    """Seconds that something takes by its number of tokens: a line through what was seen last."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_SAMPLES)

    def note(self, tokens: int, seconds: float) -> None:
        """Adds what was seen; of no tokens it says nothing."""
        if tokens > 0:
            self._seen.append((tokens, seconds))

    @property
    def longest(self) -> int:
        """Tokens of the longest that was seen; 0: none was."""
        return max((tokens for tokens, _ in self._seen), default=0)

    def seconds(self, tokens: int) -> float | None:
        """What so many are expected to take; None: nothing was seen."""
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
    """A server that computes prompts, and what the proxy knows of it."""

    client: httpx.AsyncClient
    clock: Callable[[], float] = time.monotonic
    compute: Pace = field(default_factory=Pace)  # from its turn until its reply
    fetch: Pace = field(default_factory=Pace)  # from there until the first byte of the answer
    waiting: int = 0  # tokens of prompts that it was sent and has not done
    requests: int = 0  # that it computed
    tokens: int = 0  # of them
    failures: int = 0
    _away_until: float = 0.0
    _last_done: float = 0.0
    _unanswered: int = 0
    _gone: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_away(self) -> bool:
        return self._gone.is_set() or self.clock() < self._away_until

    def expected(self, tokens: int) -> float | None:
        """Seconds until its reply to a prompt that were sent now; None: nothing is known."""
        return self.compute.seconds(self.waiting + tokens)

    def patience(self, tokens: int) -> float:
        """Seconds that its reply is waited for."""
        expected = self.expected(tokens)
        if expected is None:
            return LONGEST_PREFILL_S
        return min(LONGEST_PREFILL_S, PATIENCE * expected + PATIENCE_S)

    def seen(self, answers: bool) -> None:
        """Takes in whether it answered at all: if twice not, those who wait for it are told."""
        self._unanswered = 0 if answers else self._unanswered + 1
        if not self._unanswered:
            self._gone.clear()
        elif self._unanswered >= _UNANSWERED:
            self._gone.set()

    def rest(self) -> None:
        """Asks it nothing for a while; what it was sent is waited for."""
        self._away_until = self.clock() + PAUSE_S

    def failed(self) -> None:
        """Counts a failure, and asks it nothing for a while."""
        self.failures += 1
        self.rest()

    async def post(self, path: str, body: dict, headers: dict, tokens: int) -> dict[str, Any]:
        """Its reply to a prompt.

        Raises:
            httpx.HTTPError: it failed, or refused the request.
            TimeoutError: it took longer than it is given, or went away meanwhile.
            ValueError: the reply is no JSON.
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
                reply.cancel()  # the helper ends the request
        if not reply.done():
            raise TimeoutError
        found = reply.result().raise_for_status().json()
        self._note(tokens, sent)
        return found

    def _note(self, tokens: int, sent: float) -> None:
        """Takes in how long a prompt took.

        A helper computes one prompt after the other, about: so a prompt's time begins when it was
        sent, or when the one before was done, whichever is later.
        """
        done = self.clock()
        self.compute.note(tokens, done - max(sent, self._last_done))
        self._last_done = done
        self.requests += 1
        self.tokens += tokens

    def as_json(self) -> dict[str, Any]:
        """What the proxy's /status has of it."""
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
    """Whom to ask first, of several helpers and of the server that answers."""

    helpers: Sequence[Helper]
    shortest: int = SHORTEST_TOKENS
    alone: Pace = field(default_factory=Pace)  # the server that answers, computing prompts itself

    def order(self, tokens: int, new: int) -> list[Helper]:
        """The helpers that a prompt is worth sending to, the one that is expected soonest first.

        Helpers of which nothing is known come first, those with the fewest tokens before others: so
        each is tried. An empty list: the server that answers computes it.

        Args:
            tokens: of the prompt.
            new: those of them that the server which answers does not have.
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
        """Seconds that the server which answers takes by itself; None: nobody can tell."""
        if tokens > REACH * self.alone.longest:
            return None
        return self.alone.seconds(tokens)
