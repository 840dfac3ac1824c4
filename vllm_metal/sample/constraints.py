# SPDX-License-Identifier: Apache-2.0
"""Edits of the logits that the host knows in full: allowed tokens, min_tokens, logit_bias.

Token ids outside the vocabulary are dropped when a request is added: the model cannot produce
them, and a device scatter does not check bounds.
"""

import mlx.core as mx
import numpy as np
from vllm import SamplingParams

from vllm_metal.sample.state import Feature, Step
from vllm_metal.sample.transforms import NEG_INF, add_at, apply_bitmask, pack_allowed


class Constraints:
    """The token lists of each req_idx, and their application to the rows of a step."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._allowed: dict[int, np.ndarray] = {}
        self._stops: dict[int, np.ndarray] = {}
        self._structured: set[int] = set()
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def add(self, req_idx: int, params: SamplingParams, features: Feature) -> None:
        if Feature.ALLOWED_TOKENS in features:
            allowed, _ = self._known(list(params.allowed_token_ids or ()))
            self._allowed[req_idx] = pack_allowed(allowed, self._vocab_size)
        if Feature.MIN_TOKENS in features:
            self._stops[req_idx], _ = self._known(sorted(params.all_stop_token_ids))
            if params.structured_outputs is not None:
                self._structured.add(req_idx)
        if Feature.LOGIT_BIAS in features:
            bias = params.logit_bias or {}
            token_ids, kept = self._known(list(bias))
            values = np.fromiter(bias.values(), dtype=np.float32, count=len(bias))
            self._bias[req_idx] = (token_ids, values[kept])

    def remove(self, req_idx: int) -> None:
        self._allowed.pop(req_idx, None)
        self._stops.pop(req_idx, None)
        self._structured.discard(req_idx)
        self._bias.pop(req_idx, None)

    def apply_allowed(self, logits: mx.array, step: Step) -> mx.array:
        rows = step.rows_using(Feature.ALLOWED_TOKENS)
        masks = [self._allowed[req_idx] for req_idx in step.req_indices[rows].tolist()]
        return apply_bitmask(logits, rows, np.stack(masks))

    def apply_min_tokens(self, logits: mx.array, step: Step) -> mx.array:
        """Removes the stop tokens of requests that are still shorter than min_tokens.

        Where a grammar leaves nothing but stop tokens they stay: min_tokens gives way, as in vLLM.
        """
        rows = step.rows_using(Feature.MIN_TOKENS)
        rows = rows[step.num_output_tokens[rows] < step.rows["min_tokens"][rows]]
        if len(rows) == 0:
            return logits
        req_indices = step.req_indices[rows].tolist()
        stops = [self._stops[req_idx] for req_idx in req_indices]
        edited = add_at(
            logits, np.repeat(rows, [len(s) for s in stops]), np.concatenate(stops), NEG_INF
        )
        structured = [req_idx in self._structured for req_idx in req_indices]
        if not any(structured):
            return edited
        may_restore = np.zeros((len(step.req_indices), 1), dtype=np.bool_)
        may_restore[rows[structured]] = True
        empty = edited.max(axis=-1, keepdims=True) == NEG_INF
        return mx.where(mx.array(may_restore) & empty, logits, edited)

    def apply_logit_bias(self, logits: mx.array, step: Step) -> mx.array:
        rows = step.rows_using(Feature.LOGIT_BIAS)
        entries = [self._bias[req_idx] for req_idx in step.req_indices[rows].tolist()]
        return add_at(
            logits,
            np.repeat(rows, [len(token_ids) for token_ids, _ in entries]),
            np.concatenate([token_ids for token_ids, _ in entries]),
            np.concatenate([values for _, values in entries]),
        )

    def _known(self, token_ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The ids inside the vocabulary (int32), and the bool mask that selects them."""
        ids = np.asarray(token_ids, dtype=np.int64)
        kept = (ids >= 0) & (ids < self._vocab_size)
        return ids[kept].astype(np.int32), kept
