# SPDX-License-Identifier: Apache-2.0
"""Separates the states of ZAYA's layers from K and V: mlx-vlm keeps them in one cache.

Before attention, queries and keys are convolved, and half of each value is the previous token's
(Compressed Convolutional Attention, arXiv:2510.04476). That module keeps the inputs of its
convolutions and the previous token.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from vllm_metal.patches.mlx_patches.families.arrays import Arrays
from vllm_metal.patches.mlx_patches.families.forwards import attend
from vllm_metal.patches.mlx_patches.replacing import wrap
from vllm_metal.patches.mlx_patches.seam import AttendingCache

#: Suffix of arrays that stay in float32: rounded, they would choose other experts.
_IN_FLOAT32 = ".balancing_biases"


def language(module: ModuleType) -> None:
    """Lets caches attend, and calls the module with states with their cache alone."""
    wrap(module.ZayaAttention, "__call__", _attend)
    wrap(module.CCA, "__call__", _with_states)


def arrays(module: ModuleType) -> None:
    """Stacks the arrays of experts, which mlx-vlm does after it; keeps biases in float32."""
    wrap(module.Model, "sanitize", _stacked)
    module.Model.cast_predicate = property(lambda self: lambda name: not name.endswith(_IN_FLOAT32))


def _attend(dense: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(
        self: Any,
        x: mx.array,
        mask: Any = None,
        cca_mask: Any = None,
        image_mask: Any = None,
        cache: Any = None,
    ) -> mx.array:
        if cache is None or not isinstance(cache[0], AttendingCache):
            return dense(self, x, mask, cca_mask, image_mask, cache)
        of_attention, states = cache
        queries, keys, values = (
            mx.unflatten(part, -1, (-1, self.head_dim)).swapaxes(1, 2)
            for part in self.qkv(x, states)
        )
        queries = self.rope(queries, offset=of_attention.offset)
        keys = self.rope(keys, offset=of_attention.offset)
        return attend(queries, keys, values, self.scale, of_attention, mask, self.o_proj)

    return attention


def _with_states(before: Callable[..., Any]) -> Callable[..., Any]:
    def mix(self: Any, x: mx.array, cache: Any = None, *masks: Any) -> Any:
        # The module takes zeros for its states if the K/V cache, which it gets with them, is empty.
        pair = (object(), cache) if isinstance(cache, ArraysCache) else cache
        return before(self, x, pair, *masks)

    return mix


def _stacked(before: Callable[..., Arrays]) -> Callable[..., Arrays]:
    def sanitize(self: Any, weights: Arrays) -> Arrays:
        found: Arrays = self.language_model.sanitize(before(self, weights))
        return found

    return sanitize
