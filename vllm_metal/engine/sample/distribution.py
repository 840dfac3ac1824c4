# SPDX-License-Identifier: Apache-2.0
"""Stages of temperature, min_p, top_k and top_p; transforms.py computes their masks.

They keep the most likely token, so greedy requests do not use them.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from vllm import SamplingParams

from vllm_metal.engine.sample.stage import SamplingStage, Step
from vllm_metal.engine.sample.transforms import keep_min_p, keep_top_k_top_p


class Temperature(SamplingStage):
    """Divides the logits by the temperature; every random request uses it."""

    keeps_argmax = True

    def __init__(self, max_num_reqs: int) -> None:
        self._temperature = np.ones(max_num_reqs, dtype=np.float32)

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> bool:
        self._temperature[req_idx] = params.temperature
        return True

    def remove_request(self, req_idx: int) -> None:
        self._temperature[req_idx] = 1.0

    def heaviest(self) -> dict[str, Any]:
        return {"temperature": 1.0}  # any value that is not greedy

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        return logits / mx.array(step.column(self._temperature))


class MinP(SamplingStage):
    """Removes tokens less likely than min_p times the most likely one."""

    keeps_argmax = True

    def __init__(self, max_num_reqs: int) -> None:
        self._min_p = np.zeros(max_num_reqs, dtype=np.float32)

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> bool:
        self._min_p[req_idx] = params.min_p
        return params.min_p > 0.0

    def remove_request(self, req_idx: int) -> None:
        self._min_p[req_idx] = 0.0

    def heaviest(self) -> dict[str, Any]:
        return {"min_p": 0.01}

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        return keep_min_p(logits, mx.array(step.column(self._min_p)))


# One stage for both, because both need the logits in order.
class TopKTopP(SamplingStage):
    """Keeps the top_k most likely tokens, and of these the smallest set of mass top_p."""

    keeps_argmax = True

    def __init__(self, vocab_size: int, max_num_reqs: int) -> None:
        self._vocab_size = vocab_size
        self._top_k = np.full(max_num_reqs, vocab_size, dtype=np.int32)
        self._top_p = np.ones(max_num_reqs, dtype=np.float32)

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> bool:
        limited = 0 < params.top_k < self._vocab_size
        self._top_k[req_idx] = params.top_k if limited else self._vocab_size
        self._top_p[req_idx] = params.top_p
        return limited or params.top_p < 1.0

    def remove_request(self, req_idx: int) -> None:
        self._top_k[req_idx] = self._vocab_size
        self._top_p[req_idx] = 1.0

    def heaviest(self) -> dict[str, Any]:
        return {"top_p": 0.9}  # without top_k, which would leave only a few logits to sort

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        top_p = step.column(self._top_p)
        some = bool((top_p < 1.0).any())
        return keep_top_k_top_p(logits, step.column(self._top_k), top_p if some else None)
