# SPDX-License-Identifier: Apache-2.0
"""Remembers the last prompts of one owner, and finds the one with the longest common prefix.

Prompts are stored as a tree of chunks, keyed by their bytes, so that they share common prefixes:
each turn of a long conversation hashes all of its chunks, but takes memory only for new ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_metal.serving.prefix_misses.prompt import TOKEN, Prompt

#: Tokens per chunk.
CHUNK = 512
_SIZE = array(TOKEN).itemsize  # bytes per token


@dataclass(eq=False, slots=True)
class _Chunk:
    tokens: bytes
    parent: _Chunk | None  # the tokens before; None for the root
    following: dict[bytes, _Chunk] = field(default_factory=dict)  # by their tokens
    newest: int = 0  # number of the newest prompt that contains this chunk


@dataclass(eq=False)
class EarlierPrompt:
    """An earlier prompt, with its tokens as chunks that it shares with other prompts."""

    prompt: Prompt  # without its tokens
    num_tokens: int
    first: _Chunk
    last: _Chunk
    is_computed: bool = False  # whether it has its first token, so that its K/V are computed

    def tokens(self, first: int, end: int) -> list[int]:
        """Returns the tokens from index `first` to `end`, or to the last."""
        chunks, chunk = [], self.last
        start = self.num_tokens
        while start > first and chunk.parent is not None:
            chunks.append(chunk.tokens)
            start -= len(chunk.tokens) // _SIZE
            chunk = chunk.parent
        found = array(TOKEN, b"".join(reversed(chunks)))
        return found[first - start : end - start].tolist()


@dataclass(frozen=True)
class Closest:
    """The earlier prompt that is most similar to a new one."""

    before: EarlierPrompt
    common: int  # tokens of the common prefix


class RecentPrompts:
    """The last prompts of one owner. Not thread-safe."""

    def __init__(self, most: int) -> None:
        """most: number of prompts beyond which the oldest is forgotten."""
        self._most = most
        self._root = _Chunk(b"", None)
        self._prompts: dict[int, EarlierPrompt] = {}
        self._number = 0
        self.nbytes = 0  # of the tokens

    def __len__(self) -> int:
        return len(self._prompts)

    def has_prefix(self, prompt: Prompt) -> bool:
        """Returns whether a remembered prompt has the same first chunk."""
        return prompt.tokens[:CHUNK].tobytes() in self._root.following

    def add(self, prompt: Prompt) -> tuple[EarlierPrompt, Closest | None]:
        """Remembers a prompt; returns it and the closest earlier one.

        The closest is None if no prompt has the same first token or an equal message.
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
        remembered = EarlierPrompt(whole, len(prompt.tokens), first, last)
        self._prompts[self._number] = remembered
        if len(self._prompts) > self._most:
            self.forget()
        return remembered, closest

    def forget(self) -> None:
        """Forgets the oldest prompt."""
        number = next(iter(self._prompts))
        chunk = self._prompts.pop(number).last
        while chunk.parent is not None and chunk.newest == number:  # else a newer prompt has it
            del chunk.parent.following[chunk.tokens]
            self.nbytes -= len(chunk.tokens)
            chunk = chunk.parent

    def _closest(self, prompt: Prompt, chunk: _Chunk, rest: Sequence[bytes]) -> Closest | None:
        """Finds the closest prompt; `chunk`: last one shared with others; `rest`: later ones."""
        common = len(prompt.tokens) - sum(map(len, rest)) // _SIZE
        if not common:
            return self._by_messages(prompt, rest)
        newest = chunk.newest
        if rest:
            counts = {
                each.newest: _count_common(each.tokens, rest[0])
                for each in chunk.following.values()
            }
            most = max(counts.values(), default=0)
            if most:
                common += most
                newest = max(number for number, count in counts.items() if count == most)
        return Closest(self._prompts[newest], common)

    def _by_messages(self, prompt: Prompt, rest: Sequence[bytes]) -> Closest | None:
        """Finds the prompt with most equal messages, then the longest prefix, then the newest."""
        # Used if not even a chunk is shared: perhaps only the first line has changed.
        if not rest:
            return None
        counts = {
            each: _count_common(each.tokens, rest[0]) for each in self._root.following.values()
        }
        messages, best = set(prompt.messages), (0, 0, 0)
        for number, other in self._prompts.items():
            shared = len(messages.intersection(other.prompt.messages))
            best = max(best, (shared, counts.get(other.first, 0), number))
        *similarity, number = best
        return Closest(self._prompts[number], similarity[1]) if any(similarity) else None


def _chunks(tokens: array[int]) -> Iterator[bytes]:
    whole = tokens.tobytes()
    for first in range(0, len(whole), CHUNK * _SIZE):
        yield whole[first : first + CHUNK * _SIZE]


def _count_common(one: bytes, other: bytes) -> int:
    shorter = min(len(one), len(other)) // _SIZE
    same = np.frombuffer(one, TOKEN, shorter) == np.frombuffer(other, TOKEN, shorter)
    return shorter if same.all() else int(same.argmin())
