# SPDX-License-Identifier: Apache-2.0
"""Follows a server's prompts from the template to their first token, and says what was missed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from prometheus_client import Counter
from vllm.logger import init_logger

from vllm_metal.serving.prefix_misses.explain import Miss, explain
from vllm_metal.serving.prefix_misses.prompt import Prompt
from vllm_metal.serving.prefix_misses.recent import Closest, RecentPrompts, Remembered

logger = init_logger(__name__)

#: Prompts of one owner that are remembered, owners, and bytes of the tokens of all: 16 million.
PROMPTS, OWNERS, MOST_BYTES = 32, 256, 2**26


@dataclass
class Exchange:
    """What an HTTP request's answer may say."""

    miss: Miss | None = None


#: Of the HTTP request that this task serves; None: it serves none that wants to know.
EXCHANGE: ContextVar[Exchange | None] = ContextVar("prefix_misses_exchange", default=None)


@dataclass(frozen=True)
class Question:
    """A prompt that the engine has got."""

    prompt: Prompt
    remembered: Remembered
    closest: Closest | None
    elsewhere: bool  # whether another owner's prompt begins like it


class Watch:
    """What is said of one engine's prompts. Not thread-safe: a server's loop calls it."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        lost: Counter,
        block_size: int | None,
        prompts: int = PROMPTS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        """
        Args:
            decode: makes text of tokens.
            lost: counts tokens, by cause.
            block_size: tokens that are found together; None: the engine decides, as of hybrids, and
                what it finds tells.
            prompts: see PROMPTS.
            most_bytes: see MOST_BYTES; the least recent owner's prompts make room.
        """
        self._decode, self._lost = decode, lost
        self._block_size, self._found = block_size, 0
        self._prompts, self._most_bytes = prompts, most_bytes
        self._owners: OrderedDict[str | None, RecentPrompts] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens that are remembered."""
        return sum(recent.nbytes for recent in self._owners.values())

    def asked(
        self,
        tokens: Sequence[int],
        salt: str | None,
        messages: Sequence[Any] = (),
        tools: Sequence[Any] = (),
    ) -> Question:
        """Notes a prompt that goes to the engine.

        Args:
            tokens: of the prompt.
            salt: the request's `cache_salt`, which says whose it is: nobody is told of another's.
            messages: that a chat template made it of; none of a plain text.
            tools: likewise.
        """
        prompt = Prompt.of(tokens, messages, tools)
        recent = self._owners.setdefault(salt, RecentPrompts(self._prompts))
        self._owners.move_to_end(salt)
        remembered, closest = recent.add(prompt)
        others = (other for key, other in self._owners.items() if key != salt)
        elsewhere = any(other.has_prefix(prompt) for other in others)
        self._make_room()
        return Question(prompt, remembered, closest, elsewhere)

    def answered(self, question: Question, cached: int) -> None:
        """Says what a prompt missed, once its first token is there: to the log, to /metrics, and to
        whoever asked.

        Args:
            question: from `asked`.
            cached: tokens that were found.
        """
        question.remembered.answered = True
        self._found = gcd(self._found, cached)
        size = self._block_size or self._found or 1
        miss = explain(question.prompt, question.closest, cached, size, self._decode)
        if miss is None:
            return
        told = miss
        if miss.cause == "first_seen" and question.elsewhere:
            told = replace(miss, cause="other_salt")
        self._lost.labels(told.cause).inc(told.lost)
        if miss.cause != "first_seen":
            logger.info(
                "%d tokens of a prompt were not found in the prefix cache, %d were: %s, from token "
                "%s on, in message %s of role %s",
                *(miss.lost, miss.cached, miss.cause, miss.token, miss.message, miss.role),
            )
        if (exchange := EXCHANGE.get()) is not None:
            exchange.miss = miss

    def _make_room(self) -> None:
        while len(self._owners) > OWNERS:
            self._owners.popitem(last=False)
        while self.nbytes > self._most_bytes:
            recent = next(iter(self._owners.values()))
            recent.forget()
            if not recent:
                self._owners.popitem(last=False)
