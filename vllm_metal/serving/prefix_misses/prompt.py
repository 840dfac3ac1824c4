# SPDX-License-Identifier: Apache-2.0
"""Prompt: tokens, and fingerprints of the messages that were rendered into them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: Type code of token arrays, 32 bits. Converting a list is five times as fast as with the signed
#: type "i", and tokens are never negative.
TOKEN = "I"


class Message(NamedTuple):
    """Role of a conversation's message, and a fingerprint of its content."""

    role: str
    fingerprint: int


@dataclass(frozen=True)
class Prompt:
    """Tokens of a prompt, and its messages and tools as fingerprints."""

    tokens: array[int]  # of type TOKEN
    messages: tuple[Message, ...] = ()  # none for plain text
    tools: tuple[int, ...] = ()  # fingerprints of their definitions, in order

    @staticmethod
    def of(
        tokens: Sequence[int],
        messages: Sequence[Any] = (),
        tools: Sequence[Any] = (),
    ) -> Prompt:
        """Makes a prompt from its tokens and the JSON messages and tools rendered into them."""
        found = (Message(_role(message), _fingerprint(message)) for message in messages)
        return Prompt(array(TOKEN, tokens), tuple(found), tuple(map(_fingerprint, tools)))


def _role(message: Any) -> str:
    return str(message.get("role", "")) if isinstance(message, Mapping) else ""


def _fingerprint(value: Any) -> int:
    # Python's string hash is fast, and salted per process, so it does not reveal the text.
    if isinstance(value, str):
        return hash(value)
    if isinstance(value, Mapping):
        return hash(frozenset([(key, _fingerprint(part)) for key, part in value.items()]))
    if isinstance(value, list | tuple):
        return hash(tuple(map(_fingerprint, value)))
    return hash(value) if isinstance(value, int | float | None) else hash(repr(value))
