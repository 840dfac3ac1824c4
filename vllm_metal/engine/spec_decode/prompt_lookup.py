# SPDX-License-Identifier: Apache-2.0
"""PromptLookup: drafts for requests that repeat an earlier part of their own text."""

from __future__ import annotations

import numpy as np

from vllm_metal.engine.spec_decode.ngram import TextIndex
from vllm_metal.engine.spec_decode.proposer import Drafts

# Chosen by simulation over 120 edits of this repository's files (prompt: the file before, output:
# the file after, in SmolLM2's tokens) and 32 of its pages as prose, beside a network whose drafts
# are right with probability 0.7. From 8 tokens down to 6, edits gain nothing and prose waits more
# often; with 12, edits lose 1 % of their accepted drafts.
NGRAM = (
    8  # tokens of the shortest match that begins a copy; also generated before one is looked for
)
INTERVAL = 4  # tokens between two looks: costs edits nothing measurable, and saves host time
MISSES = 2  # steps in a row whose first copied token is wrong: the copy ends
NEAR = 32  # tokens ahead in which the newest one is looked for after a miss: a line left out
#: After a shorter copy, the request's next one needs a match of twice the length, up to the
#: maximum. Without this rule, prose that repeats phrases waits five times as often.
LEAST_COPIED, MOST_NGRAM = 16, 64
#: Tokens indexed in a step, of all requests: about 2 ms. A prompt's chunk is, as it is computed; a
#: long prefix hit takes several steps.
MOST_INDEXED = 4096


class PromptLookup:
    """Tracks which requests copy: their text ends in a long match with an earlier part of it.

    The drafts of such a request are the tokens after that earlier part. Its steps can only be laid
    out once the host knows its whole text, as a copy is worth little beyond the first wrong token.
    Costs about 200 bytes per token, a thousandth of its K/V.
    """

    def __init__(self, max_num_reqs: int) -> None:
        self._texts: dict[int, _Text] = {}
        #: [max_num_reqs] bool, by req_idx, whether the request copies.
        self.copying_np = np.zeros(max_num_reqs, bool)
        # By req_idx, from how many known tokens on there is something to do.
        self._next_np = np.zeros(max_num_reqs, np.int32)

    def begin_request(self, req_idx: int, num_prompt_tokens: int) -> None:
        """Called when a request starts or resumes, with no text known yet."""
        self.forget_request(req_idx)
        self._texts[req_idx] = _Text(num_prompt_tokens + NGRAM)

    def forget_request(self, req_idx: int) -> None:
        """Called when a request is gone, so that another one may take its req_idx."""
        self._texts.pop(req_idx, None)
        self.copying_np[req_idx] = False
        self._next_np[req_idx] = 0

    def update(
        self, token_ids_np: np.ndarray, req_indices_np: np.ndarray, num_tokens_np: np.ndarray
    ) -> bool:
        """Reads the new tokens of R requests, and updates which of them copy.

        Args:
            token_ids_np: [max_num_reqs, max_model_len] int32, by req_idx.
            req_indices_np: [R] int32, req_idx of the requests.
            num_tokens_np: [R] int32, known tokens of each request; of a prompt, computed tokens.

        Returns:
            Whether any of them copies.
        """
        due_np = num_tokens_np >= self._next_np[req_indices_np]
        budget = MOST_INDEXED
        for index in np.flatnonzero(due_np).tolist():
            req_idx, num_tokens = int(req_indices_np[index]), int(num_tokens_np[index])
            text, tokens_np = self._texts.get(req_idx), token_ids_np[req_idx, :num_tokens]
            if text is None:
                continue
            budget -= text.follow(tokens_np, budget)
            self.copying_np[req_idx] = text.is_copying
            waits = text.is_indexed and not text.is_copying
            self._next_np[req_idx] = num_tokens + (INTERVAL if waits else 1)
        return bool(self.copying_np[req_indices_np].any())

    def drafts(
        self,
        token_ids_np: np.ndarray,
        req_indices_np: np.ndarray,
        num_tokens_np: np.ndarray,
        limits_np: np.ndarray,
        num_drafts: int,
    ) -> Drafts:
        """Drafts of the requests that copy; counts are 0 for all others.

        Args:
            token_ids_np, req_indices_np, num_tokens_np: the arguments of the last `update`.
            limits_np: [R] int32, most drafts of each request.
            num_drafts: K, the width of the result.
        """
        copies: list[list[int]] = [[] for _ in req_indices_np]
        for index in np.flatnonzero(self.copying_np[req_indices_np]).tolist():
            req_idx = int(req_indices_np[index])
            known = token_ids_np[req_idx, : num_tokens_np[index]]
            copies[index] = self._texts[req_idx].following(known, int(limits_np[index])).tolist()
        return Drafts.of_lists(copies, num_drafts)


class _Text:
    """One request's text: an index of its n-grams, and the position that it copies from."""

    def __init__(self, shortest: int) -> None:
        """
        Args:
            shortest: tokens of the text before matches are looked for. A prompt that ends in a chat
                template's tokens matches earlier turns, so a match must include generated tokens.
        """
        self._shortest = shortest
        self._index = TextIndex(NGRAM, NGRAM)
        self.is_indexed = False  # all of it
        self._source = 0  # position that the next token is a copy of; 0: none is
        self._length = 0  # tokens of the text when that was so
        self._misses = self._num_copied = 0
        self._least = NGRAM  # of a match

    @property
    def is_copying(self) -> bool:
        return self._source > 0

    def follow(self, text: np.ndarray, most: int) -> int:
        """Reads the new tokens in `text`; indexes at most `most` of them, and returns how many."""
        if self.is_copying:
            self._advance(text)
        if self.is_copying:
            return 0
        before = self._index.seen.length
        end = min(len(text), before + most)
        if end > before:
            self._index.extend(text[:end])
        self.is_indexed = self._index.seen.length == len(text)
        if self.is_indexed and len(text) >= self._shortest:
            self._look(text)
        return max(end - before, 0)

    def _look(self, text: np.ndarray) -> None:
        """Starts to copy if the end of the text also occurs earlier, over enough tokens."""
        # The first occurrence has most text after it, also if a text repeats itself.
        end = self._index.match(text)
        if end and _match_length(text, end) >= self._least:
            self._source, self._length = end, len(text)
            self._num_copied = 0
            self._misses = MISSES - 1  # a match by chance ends with the first wrong token

    def _advance(self, text: np.ndarray) -> None:
        """Compares the new tokens in `text` with the copied ones; MISSES in a row end a copy."""
        count = len(text) - self._length
        if count <= 0:
            return
        start = self._source
        wrong = np.flatnonzero(text[start : start + count] != text[self._length :])
        num_copied = int(wrong[0]) if len(wrong) else count
        self._num_copied += num_copied
        self._misses = 0 if num_copied else self._misses + 1
        self._length = len(text)
        self._source += count
        if self._misses >= MISSES:
            self._source = 0
            paid = self._num_copied >= LEAST_COPIED
            self._least = NGRAM if paid else min(2 * self._least, MOST_NGRAM)
        elif not num_copied:
            # Not just one token was replaced: the edit may have left out some.
            equal = np.flatnonzero(text[start : min(start + NEAR, len(text) - 1)] == text[-1])
            if len(equal):
                self._source = start + int(equal[0]) + 1

    def following(self, text: np.ndarray, limit: int) -> np.ndarray:
        """[limit] int32, how the text continues if the copy goes on, also beyond its own end."""
        # A text whose period is shorter than the limit copies what it has just copied.
        limit = max(limit, 0)
        return np.resize(text[self._source : self._source + limit], limit)


def _match_length(text: np.ndarray, end: int) -> int:
    """How many tokens before `end` equal those that end the text, up to MOST_NGRAM."""
    most = min(end, MOST_NGRAM)
    wrong = np.flatnonzero(text[end - most : end] != text[len(text) - most :])
    return most - 1 - int(wrong[-1]) if len(wrong) else most
