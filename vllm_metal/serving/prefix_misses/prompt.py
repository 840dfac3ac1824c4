# SPDX-License-Identifier: Apache-2.0
"""A prompt as it is remembered: its tokens, and fingerprints of the messages it was made of."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: The type code of arrays of tokens: 32 bits. Python makes one of a list five times as fast as of
#: the signed type "i", and tokens are never negative.
TOKEN = "I"


class Message(NamedTuple):
    """One of a conversation. Its text is not kept."""

    role: str
    fingerprint: int


@dataclass(frozen=True)
class Prompt:
    """What a client asked, as the engine gets it."""

    tokens: array[int]  # of TOKEN
    messages: tuple[Message, ...] = ()  # none of a plain text
    tools: tuple[int, ...] = ()  # fingerprints of their definitions, in order

    @staticmethod
    def of(
        tokens: Sequence[int],
        messages: Sequence[Any] = (),
        tools: Sequence[Any] = (),
    ) -> Prompt:
        """Takes fingerprints of what a prompt was made of.

        Args:
            tokens: that a template made of the rest.
            messages: JSON objects, each with a "role".
            tools: JSON objects.
        """
        found = (Message(_role(message), _fingerprint(message)) for message in messages)
        return Prompt(array(TOKEN, tokens), tuple(found), tuple(map(_fingerprint, tools)))


def _role(message: Any) -> str:
    return str(message.get("role", "")) if isinstance(message, Mapping) else ""


def _fingerprint(value: Any) -> int:
    """A number, the same for the same JSON value in this process.

    Python's hash of a text is fast, and another in each process, so that it tells nothing of it.
    """
    if isinstance(value, str):
        return hash(value)
    if isinstance(value, Mapping):
        return hash(frozenset([(key, _fingerprint(part)) for key, part in value.items()]))
    if isinstance(value, list | tuple):
        return hash(tuple(map(_fingerprint, value)))
    return hash(value) if isinstance(value, int | float | None) else hash(repr(value))
