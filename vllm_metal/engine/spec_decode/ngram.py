# SPDX-License-Identifier: Apache-2.0
"""N-gram drafts (prompt lookup): the tokens after the first occurrence of the last n-gram."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Self

import numpy as np

from vllm_metal.engine.spec_decode.proposer import Seen, TextProposer

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig


class NgramProposer(TextProposer):
    """vLLM's methods `ngram` and `ngram_gpu`, which differ only in where vLLM runs them.

    Finds the longest n-gram, `min_n <= n <= max_n`, that ends the known tokens and also occurs
    earlier (overlap is allowed). The tokens after its first occurrence are the drafts; as in vLLM
    they end where the known text ends.
    Prompt lookup: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.

    Each request has an index that takes in only a step's new tokens, so a step's cost does not grow
    with the context.
    """

    def __init__(self, min_n: int, max_n: int, num_drafts: int) -> None:
        """
        Args:
            min_n: prompt_lookup_min.
            max_n: prompt_lookup_max.
            num_drafts: num_speculative_tokens, the most drafts of a request (K).

        Raises:
            ValueError: the settings contradict each other.
        """
        if not 1 <= min_n <= max_n:
            raise ValueError(
                f"prompt_lookup_min={min_n} and prompt_lookup_max={max_n}: "
                "need 1 <= prompt_lookup_min <= prompt_lookup_max"
            )
        if num_drafts < 1:
            raise ValueError(f"num_speculative_tokens={num_drafts}: need at least 1")
        super().__init__(num_drafts)
        self._min_n, self._max_n = min_n, max_n
        self._indices: dict[int, TextIndex] = {}

    @classmethod
    def from_config(cls, config: SpeculativeConfig) -> Self:
        shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
        assert shortest is not None and longest is not None  # vLLM fills in its defaults
        return cls(shortest, longest, config.num_speculative_tokens)

    def _guess(self, req_idx: int, text: np.ndarray, limit: int) -> list[int]:
        if limit <= 0:
            return []
        index = self._indices.get(req_idx)
        if index is None or not index.seen.is_start_of(text):
            index = self._indices[req_idx] = TextIndex(self._min_n, self._max_n)
        index.extend(text)
        end = index.match(text)
        return text[end : end + limit].tolist() if end else []

    def forget_request(self, req_idx: int) -> None:
        self._indices.pop(req_idx, None)


class TextIndex:
    """Index of the positions of each n-gram of the shortest length in one growing text.

    Has one entry per token for any range of lengths, about 150 bytes: a thousandth of a token's
    K/V. Positions are those of the token after the n-gram.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n, self._max_n = min_n, max_n
        self._ends: dict[bytes, int | array[int]] = {}  # n-gram's bytes: one end, or all ascending
        self.seen = Seen()

    def extend(self, text: np.ndarray) -> None:
        """Indexes the tokens that are new in `text`."""
        n = self._min_n
        start = max(0, self.seen.length - n + 1)  # of the first new n-gram
        data = text[start:].tobytes()
        width = n * text.itemsize
        ends = self._ends
        for end, at in enumerate(range(0, len(data) - width + 1, text.itemsize), start + n):
            gram = data[at : at + width]
            known = ends.setdefault(gram, end)
            # With a single length of n-grams, `match` uses the first place only.
            if known == end or self._min_n == self._max_n:
                continue
            if isinstance(known, int):
                ends[gram] = array("i", (known, end))
            else:
                known.append(end)
        self.seen.take(text)

    def match(self, text: np.ndarray) -> int:
        """End of the first occurrence of the longest n-gram that ends `text`; 0 if there is none.

        `text` must be indexed already.
        """
        length, n = len(text), self._min_n
        if length < n:
            return 0
        known = self._ends[text[length - n :].tobytes()]
        if isinstance(known, int):
            return known if known < length else 0
        ends = np.frombuffer(known, np.int32)[:-1]  # the last is the end of the text itself
        while n < self._max_n and len(ends) > 1:
            # Only the first place can be the text's very start, with no token before it.
            inner = ends[1:] if ends[0] == n else ends
            longer = inner[text[inner - (n + 1)] == text[length - n - 1]]
            if not len(longer):
                break
            ends, n = longer, n + 1
        return int(ends[0])
