# SPDX-License-Identifier: Apache-2.0
"""Tracks a server's prompts from the template to their first token, and reports misses."""

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
from vllm_metal.serving.prefix_misses.recent import Closest, EarlierPrompt, RecentPrompts

logger = init_logger(__name__)

#: Limits: remembered prompts per owner, owners, and bytes of all their tokens (16 million tokens).
PROMPTS, OWNERS, MOST_BYTES = 32, 256, 2**26


@dataclass
class Exchange:
    """The explanation for one HTTP request, once it is known."""

    miss: Miss | None = None


#: Result for the HTTP request that the current task serves; None if it needs none.
EXCHANGE: ContextVar[Exchange | None] = ContextVar("prefix_misses_exchange", default=None)


@dataclass(frozen=True)
class PendingPrompt:
    """A prompt that the engine computes, kept until its first output token."""

    prompt: Prompt
    remembered: EarlierPrompt
    closest: Closest | None
    elsewhere: bool  # whether a prompt of another owner has the same first chunk


class Watch:
    """Explains misses of one engine's prompts. Belongs to the server's event loop."""

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
            decode: detokenizes token ids.
            lost: counter of lost tokens, by cause.
            block_size: tokens per block; None (for hybrids): inferred from hits.
            prompts: number of prompts to remember per owner.
            most_bytes: limit of all prompts' tokens; beyond it, evicts the least recent owner's.
        """
        self._decode, self._lost = decode, lost
        self._block_size, self._hit_divisor = block_size, 0
        self._prompts, self._most_bytes = prompts, most_bytes
        self._owners: OrderedDict[str | None, RecentPrompts] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all remembered tokens."""
        return sum(recent.nbytes for recent in self._owners.values())

    def on_prompt(
        self,
        tokens: Sequence[int],
        salt: str | None,
        messages: Sequence[Any] = (),
        tools: Sequence[Any] = (),
    ) -> PendingPrompt:
        """Remembers a prompt that goes to the engine.

        Args:
            tokens: tokens of the prompt.
            salt: the request's `cache_salt`, which identifies its owner; only prompts of the same
                owner are compared.
            messages: messages that a chat template rendered into the prompt; none for plain text.
            tools: tools that it rendered.
        """
        prompt = Prompt.of(tokens, messages, tools)
        recent = self._owners.setdefault(salt, RecentPrompts(self._prompts))
        self._owners.move_to_end(salt)
        remembered, closest = recent.add(prompt)
        others = (other for key, other in self._owners.items() if key != salt)
        elsewhere = any(other.has_prefix(prompt) for other in others)
        self._evict()
        return PendingPrompt(prompt, remembered, closest, elsewhere)

    def on_first_token(self, pending: PendingPrompt, cached: int) -> None:
        """Reports a prompt's miss to log, /metrics and client; call it at the first output token.

        Args:
            pending: result of `on_prompt`.
            cached: tokens found in the prefix cache.
        """
        pending.remembered.is_computed = True
        # Hits are multiples of the block size, so their common divisor bounds an unknown one.
        self._hit_divisor = gcd(self._hit_divisor, cached)
        size = self._block_size or self._hit_divisor or 1
        miss = explain(pending.prompt, pending.closest, cached, size, self._decode)
        if miss is None:
            return
        # Only /metrics gets "other_salt": a client must not learn of another owner's prompts.
        counted = miss
        if miss.cause == "first_seen" and pending.elsewhere:
            counted = replace(miss, cause="other_salt")
        self._lost.labels(counted.cause).inc(counted.lost)
        if miss.cause != "first_seen":
            logger.info(
                "Prefix cache missed %d tokens of a prompt (%d hits): %s, from token %s, message %s"
                ", role %s",
                *(miss.lost, miss.cached, miss.cause, miss.token, miss.message, miss.role),
            )
        if (exchange := EXCHANGE.get()) is not None:
            exchange.miss = miss

    def _evict(self) -> None:
        while len(self._owners) > OWNERS:
            self._owners.popitem(last=False)
        while self.nbytes > self._most_bytes:
            recent = next(iter(self._owners.values()))
            recent.forget()
            if not recent:
                self._owners.popitem(last=False)
