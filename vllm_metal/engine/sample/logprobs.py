# SPDX-License-Identifier: Apache-2.0
"""Computes log-probabilities of chosen and most likely tokens, as lazy device arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from vllm import SamplingParams
from vllm.v1.outputs import LogprobsLists

from vllm_metal.engine.sample.stage import RequestParameters, Step
from vllm_metal.engine.sample.transforms import NEG_INF


@dataclass(frozen=True)
class Logprobs:
    """Lazy logprobs of N rows, with K most likely tokens each."""

    token_ids: mx.array  # int32 [N, K+1], the sampled (or prompt) token, then the K best in order
    logprobs: mx.array  # float32 [N, K+1]; logits in the *_logits modes
    ranks: mx.array  # int32 [N], tokens at least as likely as the first one; 1 is the best

    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        return self.token_ids, self.logprobs, self.ranks

    @staticmethod
    def joined(parts: "Sequence[Logprobs]") -> "Logprobs":
        """Concatenates the logprobs of consecutive rows, all with the same K."""
        return Logprobs(
            mx.concatenate([part.token_ids for part in parts]),
            mx.concatenate([part.logprobs for part in parts]),
            mx.concatenate([part.ranks for part in parts]),
        )

    def to_lists(self) -> LogprobsLists:
        """Waits for the device and returns vLLM's numpy form."""
        token_ids, logprobs, ranks = (np.array(array) for array in self.arrays())
        return LogprobsLists(token_ids, logprobs, ranks)


@dataclass(frozen=True)
class TokenIdRows:
    """Tokens to report instead of the most likely ones (`logprob_token_ids`)."""

    rows: np.ndarray  # bool [N, 1], rows that report them
    token_ids: np.ndarray  # int32 [N, K]
    valid: np.ndarray  # bool [N, K]; an invalid entry pads a short list and reports -inf


def gather_logprobs(
    scores: mx.array,
    chosen: mx.array,
    num_logprobs: int,
    *,
    normalize: bool = True,
    instead: TokenIdRows | None = None,
) -> Logprobs:
    """Returns logprobs of `chosen` and of the best num_logprobs tokens of each row.

    scores: logits, any float [N, V]. chosen: int32 [N]. num_logprobs: in [0, V]. normalize: report
    log_softmax(scores) rather than scores.
    """
    scores = scores.astype(mx.float32)
    chosen = chosen.astype(mx.int32)[:, None]
    ranks = (scores >= mx.take_along_axis(scores, chosen, axis=-1)).sum(axis=-1).astype(mx.int32)
    token_ids = chosen
    if num_logprobs > 0:
        if instead is None:
            others = _best(scores, num_logprobs)
        elif instead.rows.all():
            others = mx.array(instead.token_ids)
        else:
            best = _best(scores, num_logprobs)
            others = mx.where(mx.array(instead.rows), mx.array(instead.token_ids), best)
        token_ids = mx.concatenate([chosen, others], axis=-1)
    # Only the reported entries are normalized: ranks and order are those of the scores, so [N, V]
    # log-probabilities are never written.
    values = mx.take_along_axis(scores, token_ids, axis=-1)
    if normalize:
        values = values - mx.logsumexp(scores, axis=-1, keepdims=True)
    if instead is not None and num_logprobs > 0:
        valid = np.pad(instead.valid | ~instead.rows, ((0, 0), (1, 0)), constant_values=True)
        values = mx.where(mx.array(valid), values, NEG_INF)
    return Logprobs(token_ids, values, ranks)


class RequestedLogprobs(RequestParameters):
    """Stores requests' logprobs settings and reports the logprobs of sampled tokens.

    normalize: report log-probabilities rather than logits.
    """

    def __init__(self, vocab_size: int, max_num_reqs: int, normalize: bool) -> None:
        self._vocab_size = vocab_size
        self._normalize = normalize
        self._num_logprobs = np.zeros(max_num_reqs, dtype=np.int32)
        self._names_tokens = np.zeros(max_num_reqs, dtype=np.bool_)  # uses logprob_token_ids
        self._token_ids: dict[int, np.ndarray] = {}

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> bool:
        wanted = params.num_logprobs
        if wanted is None:
            return False
        whole = wanted < 0 or wanted > self._vocab_size
        self._num_logprobs[req_idx] = self._vocab_size if whole else wanted
        if params.logprob_token_ids:
            self._names_tokens[req_idx] = True
            self._token_ids[req_idx] = np.asarray(params.logprob_token_ids, dtype=np.int64)
        return True

    def remove_request(self, req_idx: int) -> None:
        self._num_logprobs[req_idx] = 0
        self._names_tokens[req_idx] = False
        self._token_ids.pop(req_idx, None)

    def width(self, step: Step) -> int | None:
        """Returns the largest number of logprobs that a row's request wants; None if none does."""
        if not step.uses(self):
            return None
        return int(self._num_logprobs[step.req_indices].max())

    def gather(self, scores: mx.array, token_ids: mx.array, step: Step, width: int) -> Logprobs:
        """Returns logprobs of a step's rows; rows that want fewer than `width` get `width` too.

        scores: logits, any float [N, V]. token_ids: int32 [N], the sampled tokens.
        """
        instead = self._token_id_rows(step, width)
        return gather_logprobs(scores, token_ids, width, normalize=self._normalize, instead=instead)

    def _token_id_rows(self, step: Step, width: int) -> TokenIdRows | None:
        naming = np.flatnonzero(self._names_tokens[step.req_indices])
        if len(naming) == 0:
            return None
        num_rows = len(step.req_indices)
        rows = np.zeros((num_rows, 1), dtype=np.bool_)
        token_ids = np.zeros((num_rows, width), dtype=np.int32)
        valid = np.zeros((num_rows, width), dtype=np.bool_)
        rows[naming] = True
        for row in naming.tolist():
            wanted = self._token_ids[int(step.req_indices[row])][:width]
            known = (wanted >= 0) & (wanted < self._vocab_size)
            token_ids[row, : len(wanted)] = np.where(known, wanted, 0)
            valid[row, : len(wanted)] = known
        return TokenIdRows(rows, token_ids, valid)


def _best(scores: mx.array, count: int) -> mx.array:
    """Returns int32 [N, count], indices of the largest scores, best first."""
    if count < scores.shape[1]:
        # A partition first: sorting only `count` candidates is cheaper than sorting the vocabulary.
        candidates = mx.argpartition(-scores, count - 1, axis=-1)[:, :count]
        order = mx.argsort(-mx.take_along_axis(scores, candidates, axis=-1), axis=-1)
        return mx.take_along_axis(candidates, order, axis=-1).astype(mx.int32)
    return mx.argsort(-scores, axis=-1).astype(mx.int32)
