# SPDX-License-Identifier: Apache-2.0
"""Whether a model computes through the paged path what its own module computes without it."""

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

#: The largest mean difference of log-probabilities, by the dtype of weights. Both forwards round
#: alike in float32: 1e-4 is usual. With 16 bits they round at other places, and an expert that
#: changes moves a token's by one half; a module that is served wrong moves most tokens' by more
#: than one.
LIMITS = {mx.float32: 0.01, mx.float16: 0.7, mx.bfloat16: 0.7}
#: Likewise of hidden states, by their lengths: two that have nothing in common are 1.4 apart.
HIDDEN_LIMITS = {mx.float32: 0.01, mx.float16: 0.5, mx.bfloat16: 0.5}
#: Of float32 where MLX may multiply it as TF32 (from M5 on): products of several rows have 11 bits
#: of it then, those of one row all, and the two forwards differ in their rows.
TF32_LIMIT = 0.05
_REPORT = (
    "Please report it; --additional-config '{\"dense_check\": false}' serves the model nevertheless"
)


@dataclass(frozen=True)
class PagedLogits:
    """What an engine said of a text. logprobs: of each token but the first."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class PagedHidden:
    """What an engine that pools computed of a text. hidden_states: [n, H] float32."""

    token_ids: Sequence[int]
    hidden_states: np.ndarray


def check_hidden(parts: ModelParts, told: PagedHidden, dtype: mx.Dtype, model_type: str) -> None:
    """Computes the hidden states once more, at once and with mlx-lm's own cache.

    Args:
        parts: of the model that was asked.
        told: of a text of a few tokens.
        dtype: of its weights.
        model_type: for the message.

    Raises:
        ModelLoadError: what was told is not what the model computes.
    """
    expected = np.array(parts.dense_hidden(told.token_ids).astype(mx.float32))
    apart = np.linalg.norm(told.hidden_states - expected, axis=-1)
    difference = float((apart / np.linalg.norm(expected, axis=-1)).mean())
    limit = _limit(HIDDEN_LIMITS, dtype)
    if not difference <= limit:
        raise ModelLoadError(
            f"{model_type} gives wrong results with the paged KV cache: hidden states of a "
            f"short text differ from mlx-lm's own forward by {difference:.2g} of their "
            f"norm on average (limit {limit}). {_REPORT}"
        )


def check(model: nn.Module, told: PagedLogits, dtype: mx.Dtype, model_type: str) -> None:
    """Computes the text once more, at once and with mlx-lm's own cache.

    Args:
        model: that was asked.
        told: of a text of a few tokens.
        dtype: of its weights.
        model_type: for the message.

    Raises:
        ModelLoadError: what was told is not what the model computes.
    """
    if not told.logprobs:
        return
    logits = model(mx.array([list(told.token_ids)]), cache=make_prompt_cache(model))
    logits = logits[0, :-1].astype(mx.float32)
    following = mx.array(list(told.token_ids[1:]))[:, None]
    chosen = mx.take_along_axis(logits, following, axis=-1)[:, 0]
    expected = np.array(chosen - mx.logsumexp(logits, axis=-1))
    difference = float(np.abs(expected - np.array(told.logprobs)).mean())
    limit = _limit(LIMITS, dtype)
    if not difference <= limit:  # nor where it is not a number
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
