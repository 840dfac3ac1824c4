# SPDX-License-Identifier: Apache-2.0
"""GPT-BigCode: embeddings of positions that are arrays, a row each.

mlx-lm's module counts from one number, of the cache of a single text.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask


def gpt_bigcode(module: ModuleType) -> None:
    """The forward around the layers."""

    def forward(self: Any, inputs: mx.array, cache: Any = None) -> mx.array:
        caches = [None] * len(self.h) if cache is None else cache
        offset = 0 if caches[0] is None else caches[0].offset
        positions = mx.arange(inputs.shape[1]) + mx.array(offset)[..., None]
        hidden = self.wte(inputs) + self.wpe(positions)
        mask = create_attention_mask(hidden, caches[0])
        for layer, of_layer in zip(self.h, caches, strict=True):
            hidden = layer(hidden, mask, cache=of_layer)
        normed: mx.array = self.ln_f(hidden)
        return normed

    module.GPTBigCodeModel.__call__ = forward
