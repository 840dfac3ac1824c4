# SPDX-License-Identifier: Apache-2.0
"""Implements allowed_token_ids, min_tokens and logit_bias.

Token ids outside the vocabulary are dropped when a request is added: the model cannot produce them,
and a device scatter does not check bounds.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from vllm import SamplingParams

from vllm_metal.engine.sample.stage import SamplingStage, Step
from vllm_metal.engine.sample.transforms import NEG_INF, add_at, apply_bitmask, pack_allowed


class AllowedTokens(SamplingStage):
    """Removes every token that is not in allowed_token_ids; keeps one bit mask per req_idx."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._masks: dict[int, np.ndarray] = {}

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> bool:
        if not params.allowed_token_ids:
            return False
        allowed, _ = _in_vocabulary(params.allowed_token_ids, self._vocab_size)
        self._masks[req_idx] = pack_allowed(allowed, self._vocab_size)
        return True

    def remove_request(self, req_idx: int) -> None:
        self._masks.pop(req_idx, None)

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        rows = step.rows_using(self)
        masks = [self._masks[req_idx] for req_idx in step.req_indices[rows].tolist()]
        return apply_bitmask(logits, rows, np.stack(masks))


class MinTokens(SamplingStage):
    """Removes the stop tokens of requests that are still shorter than min_tokens."""

    def __init__(self, vocab_size: int, max_num_reqs: int) -> None:
        self._vocab_size = vocab_size
        self._min_tokens = np.zeros(max_num_reqs, dtype=np.int32)
        self._stops: dict[int, np.ndarray] = {}
        self._structured: set[int] = set()

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> bool:
        if params.min_tokens <= 0 or not params.all_stop_token_ids:
            return False
        self._min_tokens[req_idx] = params.min_tokens
        self._stops[req_idx], _ = _in_vocabulary(
            sorted(params.all_stop_token_ids), self._vocab_size
        )
        if params.structured_outputs is not None:
            self._structured.add(req_idx)
        return True

    def remove_request(self, req_idx: int) -> None:
        self._stops.pop(req_idx, None)
        self._structured.discard(req_idx)

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        rows = step.rows_using(self)
        # Lower bound on the tokens generated; the device filters by the exact count (`_edits`).
        least = (
            step.num_output_tokens
            if step.lag is None
            else (step.num_output_tokens - step.lag.most_np)
        )
        rows = rows[least[rows] < self._min_tokens[step.req_indices[rows]]]
        if len(rows) == 0:
            return logits
        req_indices = step.req_indices[rows].tolist()
        stops = [self._stops[req_idx] for req_idx in req_indices]
        num_stops = [len(s) for s in stops]
        edited = add_at(
            logits,
            np.repeat(rows, num_stops),
            np.concatenate(stops),
            NEG_INF if step.lag is None else self._edits(step, np.repeat(rows, num_stops)),
        )
        # If a grammar allows only stop tokens, they stay: min_tokens gives way, as in vLLM.
        structured = [req_idx in self._structured for req_idx in req_indices]
        if not any(structured):
            return edited
        may_restore = np.zeros((len(step.req_indices), 1), dtype=np.bool_)
        may_restore[rows[structured]] = True
        empty = edited.max(axis=-1, keepdims=True) == NEG_INF
        return mx.where(mx.array(may_restore) & empty, logits, edited)

    def _edits(self, step: Step, rows: np.ndarray) -> mx.array:
        """Returns float32 [E] to add to stop tokens' logits: -inf in rows too short, else 0."""
        assert step.lag is not None
        over = step.num_output_tokens[rows] - self._min_tokens[step.req_indices[rows]]
        return mx.where(mx.array(over) < step.lag.of(rows).counts, NEG_INF, 0.0)


class LogitBias(SamplingStage):
    """Adds logit_bias to the logits of the tokens it names."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> bool:
        if not params.logit_bias:
            return False
        bias = params.logit_bias
        token_ids, known = _in_vocabulary(list(bias), self._vocab_size)
        values = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
        self._bias[req_idx] = (token_ids, values[known])
        return True

    def remove_request(self, req_idx: int) -> None:
        self._bias.pop(req_idx, None)

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        rows = step.rows_using(self)
        entries = [self._bias[req_idx] for req_idx in step.req_indices[rows].tolist()]
        return add_at(
            logits,
            np.repeat(rows, [len(token_ids) for token_ids, _ in entries]),
            np.concatenate([token_ids for token_ids, _ in entries]),
            np.concatenate([values for _, values in entries]),
        )


def _in_vocabulary(token_ids: Sequence[int], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids inside the vocabulary (int32) and the bool mask that selects them."""
    ids = np.asarray(token_ids, dtype=np.int64)
    inside = (ids >= 0) & (ids < vocab_size)
    return ids[inside].astype(np.int32), inside
