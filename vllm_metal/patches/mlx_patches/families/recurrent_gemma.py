# SPDX-License-Identifier: Apache-2.0
"""Stores in RecurrentGemma's state whether a text has begun."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache

from vllm_metal.patches.mlx_patches.families.forwards import through
from vllm_metal.patches.mlx_patches.replacing import wrap

#: The convolution's inputs, the recurrence's state, [B, 1] whether a token came before. mlx-lm's
#: module detects the first token by an empty cache, but states in the pool begin as zeros.
_PARTS = 3


def recurrent_gemma(module: ModuleType) -> None:
    """Makes recurrent blocks store whether a text has begun, and the forward apply the window."""

    def block(self: Any, x: mx.array, cache: Any = None, mask: Any = None) -> mx.array:
        gate = nn.gelu_approx(self.linear_y(x))
        kept = [None] * _PARTS if cache is None else cache
        inputs, kept[0] = self.conv_1d(x=self.linear_x(x), cache=kept[0])
        states = _recurrence(self.rg_lru, inputs, kept[1], kept[2])
        kept[1], kept[2] = states[:, -1], mx.ones((len(x), 1), mx.float32)
        out: mx.array = self.linear_out(states * gate)
        return out

    def with_caches(before: Any) -> Any:
        def make_cache(self: Any) -> list[Any]:
            return [
                ArraysCache(size=_PARTS) if isinstance(cache, ArraysCache) else cache
                for cache in before(self)
            ]

        return make_cache

    def forward(self: Any, tokens: mx.array, cache: Any = None) -> mx.array:
        hidden = self.embed_tokens(tokens)
        if self.scale_by_sqrt_dim:
            # transformers' class rounds the embeddings' factor to bfloat16 for every dtype.
            factor = mx.array(hidden.shape[-1] ** 0.5, mx.bfloat16)
            hidden = hidden * factor.astype(hidden.dtype)
        return through(
            self.layers, hidden, cache, self.final_norm, self.window_size, masked=self.swa_idx
        )

    module.Griffin.__call__ = forward
    module.RecurrentBlock.__call__ = block
    wrap(module.Model, "make_cache", with_caches)


def _recurrence(
    layer: Any, x: mx.array, state: mx.array | None, begun: mx.array | None
) -> mx.array:
    """Returns [B, L, D] states after each of [B, L, D] inputs x.

    layer: mlx-lm's RGLRU. state: [B, D] before the inputs; None: zeros. begun: [B, 1], 0 if a text
    begins with x; None: all texts do.
    """

    def gate(weight: mx.array, bias: mx.array) -> mx.array:
        heads = mx.unflatten(x, -1, (layer.num_heads, layer.head_dim)).swapaxes(1, 2)
        return mx.sigmoid(((heads @ weight).swapaxes(1, 2) + bias).flatten(2))

    log_decay = -8.0 * gate(layer.recurrent_gate_weight, layer.recurrent_gate_bias)
    log_decay = log_decay * nn.softplus(layer.recurrent_param)
    decay = mx.exp(log_decay)
    factor = mx.sqrt(1 - mx.exp(2 * log_decay))
    # The recurrence takes a text's first input whole and scales all others (De et al. 2024,
    # arXiv:2402.19427, section 2.4, and transformers' `RecurrentGemmaRglru`).
    first = mx.ones_like(factor[:, 0])
    if begun is not None:
        first = mx.where(begun == 0, first, factor[:, 0])
    factor = mx.concatenate([first[:, None], factor[:, 1:]], axis=1)
    inputs = x * gate(layer.input_gate_weight, layer.input_gate_bias) * factor.astype(x.dtype)
    states = []
    for step in range(x.shape[1]):
        state = inputs[:, step] if state is None else decay[:, step] * state + inputs[:, step]
        states.append(state)
    return mx.stack(states, axis=1)
