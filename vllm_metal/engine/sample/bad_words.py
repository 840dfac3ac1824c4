# SPDX-License-Identifier: Apache-2.0
"""Implements bad_words: matches forbidden sequences on the device against the newest tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from vllm import SamplingParams

from vllm_metal.engine.sample.stage import SamplingStage, Step
from vllm_metal.engine.sample.transforms import NEG_INF, add_at

#: Left padding of a prefix: matches any token and _NOTHING.
_ANY = -1
#: Left padding of a context: matches no token, so a prefix longer than the output fails.
_NOTHING = -2


@dataclass(frozen=True)
class _Words:
    """One request's bad words, each split into a prefix and a last token."""

    prefixes: np.ndarray  # int32 [W, L], right-aligned
    last: np.ndarray  # int32 [W]

    def widened(self, width: int) -> "_Words":
        missing = width - self.prefixes.shape[1]
        return _Words(
            np.pad(self.prefixes, ((0, 0), (missing, 0)), constant_values=_ANY), self.last
        )


class BadWords(SamplingStage):
    """Removes the token that would complete one of bad_words."""

    def __init__(self, vocab_size: int, max_num_reqs: int) -> None:
        self._vocab_size = vocab_size
        self._words: dict[int, _Words] = {}
        # The last L output tokens of each req_idx, newest at the right. L is the length of the
        # longest prefix seen and never shrinks. It stays 0 while every bad word is a single token,
        # which needs no device state.
        self._recent = mx.full((max_num_reqs, 0), _NOTHING, dtype=mx.int32)
        self._unwritten: dict[int, np.ndarray] = {}

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> bool:
        words = params.bad_words_token_ids
        if not words:
            return False
        # The model cannot produce a word that ends outside the vocabulary; on the device its id
        # would be out of bounds.
        words = [word for word in words if 0 <= word[-1] < self._vocab_size]
        self._widen(max((len(word) - 1 for word in words), default=0))
        prefixes = np.full((len(words), self._width), _ANY, dtype=np.int32)
        for prefix, word in zip(prefixes, words, strict=True):
            prefix[self._width - len(word) + 1 :] = word[:-1]
        last = np.array([word[-1] for word in words], dtype=np.int32)
        self._words[req_idx] = _Words(prefixes, last)
        self._unwritten[req_idx] = _right_aligned(output, self._width, _NOTHING)
        return True

    def remove_request(self, req_idx: int) -> None:
        self._words.pop(req_idx, None)
        self._unwritten.pop(req_idx, None)

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        # One device update for all requests added since the last step.
        self._write()
        rows = step.rows_using(self)
        words = [self._words[req_idx] for req_idx in step.req_indices[rows].tolist()]
        word_rows = np.repeat(rows, [len(w.last) for w in words])
        last = np.concatenate([w.last for w in words])
        if self._width == 0:
            return add_at(logits, word_rows, last, NEG_INF)
        prefixes = mx.array(np.concatenate([w.prefixes for w in words]))
        context = self._context(word_rows, step)
        matched = mx.all((prefixes == context) | (prefixes == _ANY), axis=-1)
        return add_at(logits, word_rows, last, mx.where(matched, NEG_INF, 0.0))

    def record(self, token_ids: mx.array, step: Step, accepted: mx.array | None) -> None:
        if self._width == 0:
            return
        rows = step.rows_using(self)
        # Without drafts every row outputs one token: shift the contexts left by one.
        if step.draft_spans is None or accepted is None:
            req_indices = mx.array(step.req_indices[rows])
            newest = token_ids[mx.array(rows)][:, None]
            self._recent[req_indices] = mx.concatenate(
                [self._recent[req_indices][:, 1:], newest], axis=1
            )
            return
        starts = rows[step.draft_spans.offsets_np[rows] == 0]
        req_indices = mx.array(step.req_indices[starts])
        kept = accepted[mx.array(step.draft_spans.index_np[starts])] + 1
        self._recent[req_indices] = self._followed_by(
            token_ids, req_indices, mx.array(starts), kept
        )

    def _context(self, rows: np.ndarray, step: Step) -> mx.array:
        """Returns int32 [M, L], the newest tokens before each row, including its earlier drafts."""
        req_indices = mx.array(step.req_indices[rows])
        if step.draft_spans is None:
            return self._recent[req_indices]
        offsets = step.draft_spans.offsets_np[rows]
        return self._followed_by(
            step.draft_spans.draft_ids, req_indices, mx.array(rows - offsets), mx.array(offsets)
        )

    def _followed_by(
        self, tokens: mx.array, req_indices: mx.array, starts: mx.array, counts: mx.array
    ) -> mx.array:
        """Returns int32 [M, L], recent tokens after appending counts[i] of tokens[starts[i]:].

        tokens: int32 [N]. req_indices, starts, counts: int32 [M].
        """
        column = counts[:, None] + mx.arange(self._width)
        # One gather from old contexts and new tokens laid end to end; column `width` is the first
        # new token.
        old = req_indices[:, None] * self._width + column
        new = self._recent.size + starts[:, None] + column - self._width
        everything = mx.concatenate([self._recent.reshape(-1), tokens])
        return everything[mx.where(column < self._width, old, new)]

    @property
    def _width(self) -> int:
        return self._recent.shape[1]

    def _widen(self, width: int) -> None:
        if width <= self._width:
            return
        # The new columns of contexts already on the device lack their older tokens. The prefixes of
        # these requests are no longer than the old width, so they do not look there.
        padding = mx.full((self._recent.shape[0], width - self._width), _NOTHING, dtype=mx.int32)
        self._recent = mx.concatenate([padding, self._recent], axis=1)
        self._words = {req_idx: words.widened(width) for req_idx, words in self._words.items()}

    def _write(self) -> None:
        if not self._unwritten or self._width == 0:
            return
        req_indices = np.fromiter(self._unwritten, dtype=np.int32)
        contexts = [_right_aligned(c, self._width, _NOTHING) for c in self._unwritten.values()]
        self._recent[mx.array(req_indices)] = mx.array(np.stack(contexts))
        self._unwritten.clear()


def _right_aligned(values: Sequence[int] | np.ndarray, width: int, padding: int) -> np.ndarray:
    row = np.full(width, padding, dtype=np.int32)
    used = min(width, len(values))
    if used:
        row[width - used :] = values[-used:]
    return row
