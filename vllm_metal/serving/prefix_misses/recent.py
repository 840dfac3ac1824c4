# SPDX-License-Identifier: Apache-2.0
"""Remembers the last prompts of one owner, and finds the one that a new prompt begins like.

Prompts that begin alike share what they have in common: a tree of chunks, found by hash. So a turn
of a long conversation costs the hashes of its chunks, and the memory of what is new.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_metal.serving.prefix_misses.prompt import Prompt

#: Tokens of a chunk.
CHUNK = 512
_ITEM = "i"  # of arrays: 32 bits
_Cut = tuple[int, tuple[int, ...]]  # the hash and the tokens of a chunk


@dataclass(eq=False)
class _Chunk:
    """Tokens of prompts, behind those of `parent`."""

    tokens: array[int]
    parent: _Chunk | None
    following: dict[int, _Chunk] = field(default_factory=dict)  # by hash of their tokens
    prompts: set[int] = field(default_factory=set)  # numbers of those that go through here


@dataclass(eq=False)
class Remembered:
    """A prompt of before."""

    prompt: Prompt  # without its tokens
    num_tokens: int
    last: _Chunk
    answered: bool = False  # whether its K/V are there, as its first token is

    def tokens(self, first: int, end: int) -> list[int]:
        """The tokens from place `first` to `end`, or to the last."""
        chunks, chunk = [], self.last
        place = self.num_tokens
        while place > first and chunk.parent is not None:
            chunks.append(chunk.tokens)
            place -= len(chunk.tokens)
            chunk = chunk.parent
        found = [token for tokens in reversed(chunks) for token in tokens]
        return found[first - place : end - place]


@dataclass(frozen=True)
class Closest:
    """What of a new prompt was asked before."""

    before: Remembered
    common: int  # tokens from the beginning on


class RecentPrompts:
    """Not thread-safe."""

    def __init__(self, most: int) -> None:
        """
        Args:
            most: prompts that are remembered; the one that came first makes room.
        """
        self._most = most
        self._root = _Chunk(array(_ITEM), None)
        self._prompts: dict[int, Remembered] = {}
        self._number = 0
        self.nbytes = 0  # of the tokens

    def __len__(self) -> int:
        return len(self._prompts)

    def has(self, first: int) -> bool:
        """Whether a prompt has a first chunk of this hash, see `first_chunk`."""
        return first in self._root.following

    def add(self, prompt: Prompt) -> tuple[Remembered, Closest | None]:
        """Remembers a prompt.

        Returns:
            It, and the one before it that it begins like; None: no prompt has its first token, nor
            any of its messages.
        """
        chunk, rest = self._root, list[_Cut]()
        chunks = _chunks(prompt.tokens)
        for cut in chunks:
            if (found := chunk.following.get(cut[0])) is None:
                rest = [cut, *chunks]
                break
            chunk = found
        closest = self._closest(prompt, chunk, rest)
        self._number += 1
        for key, tokens in rest:
            chunk.following[key] = chunk = _Chunk(array(_ITEM, tokens), chunk)
            self.nbytes += len(tokens) * chunk.tokens.itemsize
        whole = Prompt((), prompt.messages, prompt.tools)
        remembered = Remembered(whole, len(prompt.tokens), chunk)
        self._prompts[self._number] = remembered
        for each in _upwards(chunk):
            each.prompts.add(self._number)
        if len(self._prompts) > self._most:
            self.forget()
        return remembered, closest

    def forget(self) -> None:
        """Forgets the prompt that came first."""
        number = next(iter(self._prompts))
        for chunk in _upwards(self._prompts.pop(number).last):
            chunk.prompts.discard(number)
            if not chunk.prompts and chunk.parent is not None:
                siblings = chunk.parent.following
                for key in [key for key, other in siblings.items() if other is chunk]:
                    del siblings[key]
                self.nbytes -= len(chunk.tokens) * chunk.tokens.itemsize

    def _closest(self, prompt: Prompt, chunk: _Chunk, rest: Sequence[_Cut]) -> Closest | None:
        """
        Args:
            prompt: that is new.
            chunk: the last one that other prompts have, too.
            rest: of the prompt, behind it.
        """
        common = len(prompt.tokens) - sum(len(tokens) for _, tokens in rest)
        if not common:
            return self._by_messages(prompt, rest)
        numbers = chunk.prompts
        if rest:
            counts = {each: _alike(each.tokens, rest[0][1]) for each in chunk.following.values()}
            most = max(counts.values(), default=0)
            if most:
                common += most
                numbers = {
                    n for each, count in counts.items() if count == most for n in each.prompts
                }
        return Closest(self._prompts[max(numbers)], common)

    def _by_messages(self, prompt: Prompt, rest: Sequence[_Cut]) -> Closest | None:
        """Where not even a chunk is the same: a first line may have changed, and nothing else."""
        if not rest:
            return None
        counts = {each: _alike(each.tokens, rest[0][1]) for each in self._root.following.values()}
        messages, best = set(prompt.messages), (0, 0, 0)
        for each, count in counts.items():
            for number in each.prompts:
                shared = len(messages.intersection(self._prompts[number].prompt.messages))
                best = max(best, (shared, count, number))
        *alike, number = best
        return Closest(self._prompts[number], alike[1]) if any(alike) else None


def first_chunk(tokens: Sequence[int]) -> int:
    """The hash of a prompt's first chunk."""
    return hash(tuple(tokens[:CHUNK]))


def _chunks(tokens: Sequence[int]) -> Iterator[_Cut]:
    """The last one may be shorter.

    Two chunks with one hash of 64 bits would be taken for the same, and a report be wrong.
    """
    for first in range(0, len(tokens), CHUNK):
        chunk = tuple(tokens[first : first + CHUNK])
        yield hash(chunk), chunk


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other))
    same = np.asarray(one[:shorter]) == np.asarray(other[:shorter])
    return shorter if same.all() else int(same.argmin())


def _upwards(chunk: _Chunk) -> Iterator[_Chunk]:
    found: _Chunk | None = chunk
    while found is not None:
        yield found
        found = found.parent
