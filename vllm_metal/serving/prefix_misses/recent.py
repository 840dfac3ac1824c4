# SPDX-License-Identifier: Apache-2.0
"""Remembers the last prompts of one owner, and finds the one that a new prompt begins like.

Prompts that begin alike share what they have in common: a tree of chunks, found by their bytes. So
a turn of a long conversation costs the hashes of its chunks, and the memory of what is new.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_metal.serving.prefix_misses.prompt import TOKEN, Prompt

#: Tokens of a chunk.
CHUNK = 512
_SIZE = array(TOKEN).itemsize  # bytes of a token


@dataclass(eq=False, slots=True)
class _Chunk:
    """Tokens of prompts, behind those of `parent`."""

    tokens: bytes
    parent: _Chunk | None
    following: dict[bytes, _Chunk] = field(default_factory=dict)  # by their tokens
    newest: int = 0  # number of the last prompt that goes through here


@dataclass(eq=False)
class Remembered:
    """A prompt of before."""

    prompt: Prompt  # without its tokens
    num_tokens: int
    first: _Chunk
    last: _Chunk
    answered: bool = False  # whether its K/V are there, as its first token is

    def tokens(self, first: int, end: int) -> list[int]:
        """The tokens from place `first` to `end`, or to the last."""
        chunks, chunk = [], self.last
        place = self.num_tokens
        while place > first and chunk.parent is not None:
            chunks.append(chunk.tokens)
            place -= len(chunk.tokens) // _SIZE
            chunk = chunk.parent
        found = array(TOKEN, b"".join(reversed(chunks)))
        return found[first - place : end - place].tolist()


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
        self._root = _Chunk(b"", None)
        self._prompts: dict[int, Remembered] = {}
        self._number = 0
        self.nbytes = 0  # of the tokens

    def __len__(self) -> int:
        return len(self._prompts)

    def has_prefix(self, prompt: Prompt) -> bool:
        """Whether one has the first chunk of this one."""
        return prompt.tokens[:CHUNK].tobytes() in self._root.following

    def add(self, prompt: Prompt) -> tuple[Remembered, Closest | None]:
        """Remembers a prompt.

        Returns:
            It, and the one before it that it begins like; None: no prompt has its first token, nor
            any of its messages.
        """
        chunk, rest = self._root, list[bytes]()
        chunks = _chunks(prompt.tokens)
        for tokens in chunks:
            if (found := chunk.following.get(tokens)) is None:
                rest = [tokens, *chunks]
                break
            chunk = found
        closest = self._closest(prompt, chunk, rest)
        self._number += 1
        for tokens in rest:
            chunk.following[tokens] = chunk = _Chunk(tokens, chunk)
            self.nbytes += len(tokens)
        whole = Prompt(array(TOKEN), prompt.messages, prompt.tools)
        first = last = chunk
        while chunk.parent is not None:
            chunk.newest, first, chunk = self._number, chunk, chunk.parent
        remembered = Remembered(whole, len(prompt.tokens), first, last)
        self._prompts[self._number] = remembered
        if len(self._prompts) > self._most:
            self.forget()
        return remembered, closest

    def forget(self) -> None:
        """Forgets the prompt that came first."""
        number = next(iter(self._prompts))
        chunk = self._prompts.pop(number).last
        while chunk.parent is not None and chunk.newest == number:  # others came later
            del chunk.parent.following[chunk.tokens]
            self.nbytes -= len(chunk.tokens)
            chunk = chunk.parent

    def _closest(self, prompt: Prompt, chunk: _Chunk, rest: Sequence[bytes]) -> Closest | None:
        """
        Args:
            prompt: that is new.
            chunk: the last one that other prompts have, too.
            rest: of the prompt, behind it.
        """
        common = len(prompt.tokens) - sum(map(len, rest)) // _SIZE
        if not common:
            return self._by_messages(prompt, rest)
        newest = chunk.newest
        if rest:
            counts = {
                each.newest: _alike(each.tokens, rest[0]) for each in chunk.following.values()
            }
            most = max(counts.values(), default=0)
            if most:
                common += most
                newest = max(number for number, count in counts.items() if count == most)
        return Closest(self._prompts[newest], common)

    def _by_messages(self, prompt: Prompt, rest: Sequence[bytes]) -> Closest | None:
        """Where not even a chunk is the same: a first line may have changed, and nothing else."""
        if not rest:
            return None
        counts = {each: _alike(each.tokens, rest[0]) for each in self._root.following.values()}
        messages, best = set(prompt.messages), (0, 0, 0)
        for number, other in self._prompts.items():
            shared = len(messages.intersection(other.prompt.messages))
            best = max(best, (shared, counts.get(other.first, 0), number))
        *alike, number = best
        return Closest(self._prompts[number], alike[1]) if any(alike) else None


def _chunks(tokens: array[int]) -> Iterator[bytes]:
    """The last one may be shorter."""
    whole = tokens.tobytes()
    for first in range(0, len(whole), CHUNK * _SIZE):
        yield whole[first : first + CHUNK * _SIZE]


def _alike(one: bytes, other: bytes) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other)) // _SIZE
    same = np.frombuffer(one, TOKEN, shorter) == np.frombuffer(other, TOKEN, shorter)
    return shorter if same.all() else int(same.argmin())
