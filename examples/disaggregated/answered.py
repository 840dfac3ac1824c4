# SPDX-License-Identifier: Apache-2.0
"""Estimates how much of a prompt the decode server has cached, from earlier prompts.

A conversation's next turn repeats everything before it. Its last decode server still has that in
its pool, including the answer, and may compute the question faster than others the whole prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

#: Default pool size in tokens.
POOL_TOKENS = 32_768
_CHARACTERS_A_TOKEN = 4  # for English; an error affects all servers alike, and cancels out
_PIECE_TOKENS = 64  # per piece of a text or of token ids; messages are not split


def count(value: object) -> float:
    """Estimates the tokens in a part of a request: token ids, or characters / 4."""
    if isinstance(value, str):
        if value.startswith("data:"):  # an image, not text
            return 0.0
        return len(value) / _CHARACTERS_A_TOKEN
    if isinstance(value, dict):
        return sum(count(inner) for inner in value.values())
    if isinstance(value, list):
        return sum(count(inner) for inner in value)
    return 0.0 if value is None else 1.0


def prompt_tokens(body: dict[str, Any]) -> int:
    """Estimates the length of a request's prompt."""
    return round(sum(count(body.get(name)) for name in ("prompt", "messages", "tools")))


@dataclass(frozen=True)
class _Piece:
    digest: bytes  # of this piece and all before it
    tokens: float
    is_answer: bool  # written by the server itself


class Answered:
    """Remembers prefixes of recent prompts as digests; stores no text."""

    def __init__(self, pool_tokens: int = POOL_TOKENS) -> None:
        """
        Args:
            pool_tokens: size of the decode server's KV pool in tokens.
        """
        self._most = pool_tokens
        self._held = 0.0
        self._tokens: OrderedDict[bytes, float] = OrderedDict()

    def new_tokens(self, body: dict[str, Any], whose: str) -> int:
        """Returns how many of a prompt's tokens are not known to be in the server's cache.

        Args:
            body: the request body.
            whose: the client; clients do not share prefixes.
        """
        known, any_known = 0.0, False
        for piece in _pieces(body, whose):
            if piece.digest not in self._tokens and not (any_known and piece.is_answer):
                break
            any_known = True
            known += piece.tokens
        return max(0, prompt_tokens(body) - round(known))

    def note(self, body: dict[str, Any], whose: str) -> None:
        """Records an answered prompt, and drops the oldest prefixes over the token limit."""
        # Reversed, so that the ends of prompts are dropped before their prefixes.
        for piece in reversed(list(_pieces(body, whose))):
            self._held += piece.tokens - self._tokens.pop(piece.digest, 0.0)
            self._tokens[piece.digest] = piece.tokens
        while self._held > self._most:
            self._held -= self._tokens.popitem(last=False)[1]


def _pieces(body: dict[str, Any], whose: str) -> Iterator[_Piece]:
    digest = hashlib.sha256(json.dumps([whose, body.get("model"), body.get("tools")]).encode())
    for value, is_answer in _parts(body):
        digest.update(json.dumps(value, sort_keys=True).encode() + b"\0")
        yield _Piece(digest.copy().digest(), count(value), is_answer)


def _parts(body: dict[str, Any]) -> Iterator[tuple[object, bool]]:
    """Yields a prompt's parts in order, and whether each is an answer."""
    prompt = body.get("prompt") or []
    step = _PIECE_TOKENS * (_CHARACTERS_A_TOKEN if isinstance(prompt, str) else 1)
    for start in range(0, len(prompt), step):
        yield prompt[start : start + step], False
    for message in body.get("messages") or []:
        yield message, isinstance(message, dict) and message.get("role") == "assistant"
