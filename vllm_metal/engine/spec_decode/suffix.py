# SPDX-License-Identifier: Apache-2.0
"""Suffix decoding: drafts the tokens that most often followed the text's last tokens before.

SuffixDecoding, Oliaro et al. 2024, arXiv:2411.04975, with the options of vLLM's method `suffix`.
The paper counts in suffix trees; here, counts are taken on demand over the positions where the last
tokens occurred before. A tree of the default depth holds 24 nodes per token, the index below two
entries, and only the newest positions of a frequent n-gram are looked at.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from vllm_metal.engine.spec_decode.proposer import Seen, TextProposer

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

GRAM_SIZES = (4, 2)  # tokens of the indexed n-grams, in the order of look-up
MAX_PLACES = 64  # newest places of an n-gram that are counted over
#: Tokens of all cached outputs, at some 250 bytes each (measured on Zipf-distributed tokens).
MAX_CACHED_TOKENS = 1 << 19  # 130 MB
_ITEM = np.dtype(np.int32).itemsize
_GAP = -1  # no token: before, between and after texts


@dataclass(frozen=True)
class SuffixOptions:
    """vLLM's `suffix_decoding_*` settings, under the same names."""

    max_tree_depth: int = 24  # most tokens of match and drafts together
    max_cached_requests: int = 10_000  # outputs kept, first in first out; 0: none
    max_spec_factor: float = 1.0  # drafts per token of the match
    min_token_prob: float = 0.1  # drafts less likely than this are not made


class SuffixProposer(TextProposer):
    """vLLM's method `suffix`, over a request's own text and the outputs of past requests.

    Past outputs are shared only within a scope, since whoever sees how fast drafts are accepted
    could tell whether a text has been produced before. A request's scope is its cache_salt, as
    for vLLM's prefix cache; requests without one share a scope.
    """

    def __init__(
        self,
        num_drafts: int,
        options: SuffixOptions,
        max_cached_tokens: int = MAX_CACHED_TOKENS,
    ) -> None:
        """
        Args:
            num_drafts: num_speculative_tokens, the most drafts of a request (K).
            options: the configured settings.
            max_cached_tokens: most tokens of all cached outputs, a second bound on memory.
        """
        super().__init__(num_drafts)
        self._options = options
        depth, factor = options.max_tree_depth, options.max_spec_factor
        # By match length; the small term keeps rounding from costing a draft.
        self._budgets = [min(int(n * factor + 1e-6), depth - n) for n in range(max(depth, 2))]
        self._texts: dict[int, _Text] = {}
        self._scopes: dict[int, str | None] = {}
        self._cache = _OutputCache(options.max_cached_requests, max_cached_tokens)

    @classmethod
    def from_config(cls, config: SpeculativeConfig) -> Self:
        options = SuffixOptions(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )
        return cls(config.num_speculative_tokens, options)

    def set_scope(self, req_idx: int, scope: str | None) -> None:
        self._scopes[req_idx] = scope

    def forget_request(self, req_idx: int) -> None:
        scope = self._scopes.pop(req_idx, None)
        state = self._texts.pop(req_idx, None)
        if state is not None:
            self._cache.add_output(scope, np.array(state.output, np.int32))

    def _guess(self, req_idx: int, text: np.ndarray, limit: int) -> list[int]:
        state = self._texts.get(req_idx)
        if state is None or not state.seen.is_start_of(text):
            state = self._texts[req_idx] = _Text()
        state.follow(text)
        if limit <= 0:
            return []
        state.index(text)
        score, guess = self._likeliest(text, state.places.of_ending(text), text, limit)
        corpus = self._cache.corpora.get(self._scopes.get(req_idx))
        if corpus is not None:
            ends = corpus.places.of_ending(text) - corpus.first
            others_score, others = self._likeliest(corpus.tokens_np, ends, text, limit)
            if others_score > score:
                return others
        return guess

    def _likeliest(
        self, source: np.ndarray, ends: np.ndarray, text: np.ndarray, limit: int
    ) -> tuple[float, list[int]]:
        """Score and tokens of the best draft after a match in one source; (0.0, []) if none."""
        ends = ends[ends < len(source)]  # without the text's own end
        if not len(ends):
            return 0.0, []
        lengths = _match_lengths(source, ends, text[-max(1, self._options.max_tree_depth - 1) :])
        follow = _following(source, ends, limit)
        levels = sorted(set(lengths), reverse=True)
        best: tuple[float, list[int]] = (0.0, [])
        for level, shorter in zip(levels, [*levels[1:], 0], strict=True):
            # Match lengths shorter + 1 to level have the same places: the largest budget holds.
            budget = min(limit, max(self._budgets[shorter + 1 : level + 1]))
            if budget > best[0]:  # a score is a sum of that many probabilities
                rows = [row for row, length in zip(follow, lengths, strict=True) if length >= level]
                guess = _most_frequent_path(rows, budget, self._options.min_token_prob)
                if guess[0] > best[0]:
                    best = guess
        return best


def _match_lengths(source: np.ndarray, ends: np.ndarray, tail: np.ndarray) -> list[int]:
    """How many tokens before each end equal those at the end of `tail`."""
    back = ends[:, None] - np.arange(1, len(tail) + 1)
    equal = (source[np.maximum(back, 0)] == tail[::-1]) & (back >= 0)
    lengths: list[int] = np.where(equal.all(1), len(tail), equal.argmin(1)).tolist()
    return lengths


def _following(source: np.ndarray, ends: np.ndarray, num_tokens: int) -> list[list[int]]:
    """The `num_tokens` tokens of the source from each end on; gaps beyond the source's end."""
    ahead = ends[:, None] + np.arange(num_tokens)
    last = len(source) - 1
    follow: list[list[int]] = np.where(
        ahead <= last, source[np.minimum(ahead, last)], _GAP
    ).tolist()
    return follow


def _most_frequent_path(
    rows: Sequence[list[int]], num_tokens: int, min_prob: float
) -> tuple[float, list[int]]:
    """Repeatedly takes the most frequent next token among the rows that agree so far.

    Args:
        rows: the tokens that followed each earlier position, oldest first.
        num_tokens: most tokens taken.
        min_prob: ends the path once its probability falls below.

    Returns:
        Sum of the path's probabilities, which is the expected number of accepted tokens, and
        the path.
    """
    path: list[int] = []
    score, prob = 0.0, 1.0
    # The text's own end is an occurrence too, of an unknown continuation. It keeps a single
    # example from passing for a certainty.
    total = len(rows) + 1
    for index in range(num_tokens):
        if len(rows) == 1:  # no choice any more
            prob /= total
            rest = rows[0][index:num_tokens]
            rest = rest[: rest.index(_GAP)] if _GAP in rest else rest
            return (score + prob * len(rest), path + rest) if prob >= min_prob else (score, path)
        counts: dict[int, int] = {}
        for row in rows:
            counts[row[index]] = counts.get(row[index], 0) + 1
        most = max(counts.values())
        # The last seen of equally frequent tokens.
        token = next(row[index] for row in reversed(rows) if counts[row[index]] == most)
        prob *= most / total
        if token == _GAP or prob < min_prob:
            break
        path.append(token)
        score += prob
        if most < len(rows):
            rows = [row for row in rows if row[index] == token]
        total = most
    return score, path


class _Places:
    """The newest positions of each indexed n-gram, as positions of the token after it."""

    def __init__(self) -> None:
        self._ends: dict[bytes, array[int]] = {}  # ascending

    def add_ngrams(self, tokens: np.ndarray, num_known: int = 0, offset: int = 0) -> None:
        """Indexes the n-grams of `tokens` that end after the first `num_known` of them.

        `offset` is the position of `tokens[0]`.
        """
        for size in GRAM_SIZES:
            start = max(0, num_known - size + 1)
            for end, gram in enumerate(_grams(tokens[start:], size), offset + start + size):
                known = self._ends.get(gram)
                if known is None:
                    self._ends[gram] = array("q", (end,))
                    continue
                known.append(end)
                if len(known) > 2 * MAX_PLACES:
                    del known[:MAX_PLACES]

    def drop_ngrams(self, tokens: np.ndarray, end: int) -> None:
        """Drops the n-grams of `tokens`, the oldest indexed ones, that end at `end` or before."""
        for size in GRAM_SIZES:
            for gram in _grams(tokens, size):
                known = self._ends.get(gram)
                if known is None:
                    continue
                while known and known[0] <= end:
                    del known[0]
                if not known:
                    del self._ends[gram]

    def of_ending(self, text: np.ndarray) -> np.ndarray:
        """[n] int64 ascending, ends of the n-gram that ends `text`; its own end, too, if indexed.

        Takes the longest n-gram that has more than one position, else the shortest.
        """
        found = array("q")
        for size in GRAM_SIZES:
            if len(text) >= size:
                found = self._ends.get(text[-size:].tobytes(), found)
            if len(found) > 1:
                break
        return np.array(found[-MAX_PLACES:], np.int64)


def _grams(tokens: np.ndarray, size: int) -> Iterator[bytes]:
    data, width = tokens.tobytes(), size * _ITEM
    return (data[at : at + width] for at in range(0, len(data) - width + 1, _ITEM))


class _Text:
    """One request's text: how far it is known, its output, and an index of its n-grams."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.output: list[int] = []  # tokens that came after the text was first seen
        self.places = _Places()
        self._num_indexed = 0

    def follow(self, text: np.ndarray) -> None:
        """Records the new tokens of the text, which begins with those known before."""
        if self.seen.length:
            self.output += text[self.seen.length :].tolist()
        self.seen.take(text)

    def index(self, text: np.ndarray) -> None:
        """Indexes the new tokens; called only when drafts are wanted."""
        self.places.add_ngrams(text, self._num_indexed)
        self._num_indexed = len(text)


class _Corpus:
    """The past outputs of one scope, concatenated with gaps between them."""

    def __init__(self) -> None:
        self.tokens_np = np.full(1, _GAP, np.int32)
        self.first = 0  # position of the first token held; positions are never given twice
        self.places = _Places()
        self._outputs: deque[tuple[int, int]] = deque()  # start and end of each, oldest first

    def __len__(self) -> int:
        return len(self._outputs)

    def add_output(self, output: np.ndarray) -> None:
        start = self.first + len(self.tokens_np)
        self._outputs.append((start, start + len(output)))
        self.tokens_np = np.concatenate([self.tokens_np, output, [_GAP]], dtype=np.int32)
        self.places.add_ngrams(output, offset=start)

    def drop_oldest(self) -> None:
        start, end = self._outputs.popleft()
        self.places.drop_ngrams(self.tokens_np[start - self.first : end - self.first], end)
        self.tokens_np = self.tokens_np[end - self.first :].copy()  # from the gap behind it
        self.first = end


class _OutputCache:
    """Past outputs by scope; the oldest output of any scope is dropped first."""

    def __init__(self, max_outputs: int, max_tokens: int) -> None:
        self.corpora: dict[str | None, _Corpus] = {}
        self._max_outputs, self._max_tokens = max_outputs, max_tokens
        self._ages: deque[tuple[str | None, int]] = deque()  # scope and length, oldest first
        self._num_tokens = 0

    def add_output(self, scope: str | None, output: np.ndarray) -> None:
        if not self._max_outputs or not 0 < len(output) <= self._max_tokens:
            return
        self.corpora.setdefault(scope, _Corpus()).add_output(output)
        self._ages.append((scope, len(output)))
        self._num_tokens += len(output)
        while len(self._ages) > self._max_outputs or self._num_tokens > self._max_tokens:
            oldest, length = self._ages.popleft()
            self._num_tokens -= length
            self.corpora[oldest].drop_oldest()
            if not len(self.corpora[oldest]):
                del self.corpora[oldest]
