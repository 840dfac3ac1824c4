# SPDX-License-Identifier: Apache-2.0
"""Scalar sampling parameters of every req_idx, in one numpy table.

A step reads all of its parameters with a single fancy index (`ParameterTable.step`), and learns
which features are in use with a single OR over the feature bits, so the Python work of a step
does not grow with the number of requests.
"""

from dataclasses import dataclass
from enum import IntFlag

import numpy as np
from vllm import SamplingParams

from vllm_metal.sample.draft_spans import DraftSpans

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy; the threshold vLLM documents for `temperature`."""


class Feature(IntFlag):
    """What a request asks of the sampler, one bit each. NONE of them: plain greedy."""

    RANDOM = 1
    SEEDED = 2
    TOP_K = 4
    TOP_P = 8
    MIN_P = 16
    PENALTIES = 32
    ALLOWED_TOKENS = 64
    MIN_TOKENS = 128
    LOGIT_BIAS = 256
    BAD_WORDS = 512
    LOGPROB_TOKEN_IDS = 1024


NO_LOGPROBS = -1

_ROW = np.dtype(
    [
        ("features", np.uint32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("min_tokens", np.int32),
        ("num_logprobs", np.int32),
        ("seed", np.uint64),
    ]
)


@dataclass(frozen=True)
class Step:
    """The parameters of one step's rows (at least one), made fresh each step and never changed.

    req_indices: int32 [N], the req_idx of each logits row.
    num_output_tokens: int32 [N], tokens generated before this one.
    rows: structured array [N], the req_idx table's row of each logits row.
    active: the union of the rows' features.
    draft_spans: of drafts to verify; None where every row is a request of its own.
    """

    req_indices: np.ndarray
    num_output_tokens: np.ndarray
    rows: np.ndarray
    active: int
    draft_spans: DraftSpans | None

    def uses(self, feature: Feature) -> bool:
        return bool(self.active & feature)

    def rows_using(self, feature: Feature) -> np.ndarray:
        """Indices (int32, ascending) of the rows with `feature`."""
        return np.flatnonzero(self.rows["features"] & np.uint32(feature)).astype(np.int32)

    def column(self, name: str) -> np.ndarray:
        """One parameter of every row, [N, 1], ready to broadcast against logits."""
        return np.ascontiguousarray(self.rows[name])[:, None]

    @property
    def num_logprobs(self) -> int:
        """The largest number of logprobs any row asked for, or NO_LOGPROBS."""
        return int(self.rows["num_logprobs"].max())


class ParameterTable:
    """Sampling parameters by req_idx; the only place where `SamplingParams` scalars are read."""

    def __init__(self, vocab_size: int, max_num_reqs: int) -> None:
        self._vocab_size = vocab_size
        self._table = np.zeros(max_num_reqs, dtype=_ROW)

    def add(self, req_idx: int, params: SamplingParams) -> Feature:
        """Fills the req_idx's row and returns the features the request uses."""
        vocab_size = self._vocab_size
        features = _features(params, vocab_size)
        random = Feature.RANDOM in features
        num_logprobs = params.num_logprobs
        if num_logprobs is None:
            num_logprobs = NO_LOGPROBS
        elif num_logprobs < 0 or num_logprobs > vocab_size:
            num_logprobs = vocab_size
        row = self._table[req_idx : req_idx + 1]
        row["features"] = int(features)
        # A greedy row divides by one and its noise is multiplied by zero (random.py).
        row["temperature"] = params.temperature if random else 1.0
        row["top_k"] = params.top_k if Feature.TOP_K in features else vocab_size
        row["top_p"] = params.top_p if Feature.TOP_P in features else 1.0
        row["min_p"] = params.min_p if Feature.MIN_P in features else 0.0
        row["repetition"] = params.repetition_penalty
        row["frequency"] = params.frequency_penalty
        row["presence"] = params.presence_penalty
        row["min_tokens"] = params.min_tokens
        row["num_logprobs"] = num_logprobs
        row["seed"] = (params.seed or 0) & 0xFFFF_FFFF_FFFF_FFFF
        return features

    def step(
        self, req_indices: np.ndarray, num_output_tokens: np.ndarray, draft_spans: DraftSpans | None
    ) -> Step:
        rows = self._table[req_indices]
        active = int(np.bitwise_or.reduce(rows["features"]))
        return Step(req_indices, num_output_tokens, rows, active, draft_spans)


def _features(params: SamplingParams, vocab_size: int) -> Feature:
    random = params.temperature >= GREEDY_EPSILON
    asked = {
        Feature.RANDOM: random,
        Feature.SEEDED: random and params.seed is not None,
        Feature.TOP_K: random and 0 < params.top_k < vocab_size,
        Feature.TOP_P: random and params.top_p < 1.0,
        Feature.MIN_P: random and params.min_p > 0.0,
        Feature.PENALTIES: params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0,
        Feature.ALLOWED_TOKENS: bool(params.allowed_token_ids),
        Feature.MIN_TOKENS: params.min_tokens > 0 and bool(params.all_stop_token_ids),
        Feature.LOGIT_BIAS: bool(params.logit_bias),
        Feature.BAD_WORDS: bool(params.bad_words_token_ids),
        Feature.LOGPROB_TOKEN_IDS: bool(params.logprob_token_ids),
    }
    features = Feature(0)
    for feature, wanted in asked.items():
        if wanted:
            features |= feature
    return features
