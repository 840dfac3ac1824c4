# SPDX-License-Identifier: Apache-2.0
"""Checks that a model's paged forward computes the same as mlx-lm's own dense forward."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal.engine.models.parts import ModelParts
from vllm_metal.identity.model_files import ModelLoadError

#: Largest mean difference of log-probabilities, by dtype of the weights. In float32 both forwards
#: round nearly the same: 1e-4 is usual. In 16 bits they round at different operations, and a
#: changed expert moves a token's value by 0.5; a wrong module moves those of most tokens by over 1.
LIMITS = {mx.float32: 0.01, mx.float16: 0.7, mx.bfloat16: 0.7}
#: The same for hidden states, relative to their norms: two unrelated states are 1.4 distances.
HIDDEN_LIMITS = {mx.float32: 0.01, mx.float16: 0.5, mx.bfloat16: 0.5}
#: For float32 where MLX may multiply it as TF32 (from M5 on): products of several rows then have 11
#: bits of mantissa, those of one row all 24, and the two forwards differ in their rows.
TF32_LIMIT = 0.05
_REPORT = (
    "Please report it; --additional-config '{\"dense_check\": false}' serves the model nevertheless"
)


@dataclass(frozen=True)
class PagedLogits:
    """An engine's result for a text; `logprobs` of each token but the first."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class PagedHidden:
    """A pooling engine's result for a text; `hidden_states` are [n, H] float32."""

    token_ids: Sequence[int]
    hidden_states: np.ndarray


def check_hidden(parts: ModelParts, paged: PagedHidden, dtype: mx.Dtype, model_type: str) -> None:
    """Compares hidden states of a short text with a dense forward over mlx-lm's own cache.

    `dtype` is that of the weights, `model_type` is for the message.

    Raises ModelLoadError: the hidden states differ by more than the limit.
    """
    expected = np.array(parts.dense_hidden(paged.token_ids).astype(mx.float32))
    distances = np.linalg.norm(paged.hidden_states - expected, axis=-1)
    difference = float((distances / np.linalg.norm(expected, axis=-1)).mean())
    limit = _limit(HIDDEN_LIMITS, dtype)
    if not difference <= limit:
        raise ModelLoadError(
            f"{model_type} gives wrong results with the paged KV cache: hidden states of a "
            f"short text differ from mlx-lm's own forward by {difference:.2g} of their "
            f"norm on average (limit {limit}). {_REPORT}"
        )


def check(model: nn.Module, paged: PagedLogits, dtype: mx.Dtype, model_type: str) -> None:
    """Like `check_hidden`, but compares the log-probabilities of a text's tokens."""
    if not paged.logprobs:
        return
    logits = model(mx.array([list(paged.token_ids)]), cache=make_prompt_cache(model))
    logits = logits[0, :-1].astype(mx.float32)
    following = mx.array(list(paged.token_ids[1:]))[:, None]
    chosen = mx.take_along_axis(logits, following, axis=-1)[:, 0]
    expected = np.array(chosen - mx.logsumexp(logits, axis=-1))
    difference = float(np.abs(expected - np.array(paged.logprobs)).mean())
    limit = _limit(LIMITS, dtype)
    if not difference <= limit:  # written so that NaN fails, too
        raise ModelLoadError(
            f"{model_type} gives wrong results with the paged KV cache: log-probabilities "
            f"of a short text differ from mlx-lm's own forward by {difference:.2g} on "
            f"average (limit {limit}). {_REPORT}"
        )


def _limit(limits: Mapping[mx.Dtype, float], dtype: mx.Dtype) -> float:
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    if dtype == mx.float32 and on_gpu and os.environ.get("MLX_ENABLE_TF32", "1") != "0":
        return TF32_LIMIT
    return limits[dtype]
