# SPDX-License-Identifier: Apache-2.0
"""Lets paged caches apply the windows of Limite's layers, which mlx-vlm masks over whole texts.

Its norms have torch's default epsilon. That is float32's for float16 and bfloat16, too, where
mlx-vlm's module adds 0.008 to squares of embeddings of 0.0004.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from vllm_metal.patches.mlx_patches.families.forwards import offset_of
from vllm_metal.patches.mlx_patches.families.inkling import MaskedWindowCache
from vllm_metal.patches.mlx_patches.families.norms import TORCH_EPSILON
from vllm_metal.patches.mlx_patches.replacing import wrap

#: Part of names of weights that the module reads in float32, whatever the model's dtype.
_IN_FLOAT32 = ".xsa_alpha"


def language(module: ModuleType) -> None:
    """Takes each text's positions, and creates caches that know the layers' windows."""
    module.rms_norm = _rms_norm  # type: ignore[attr-defined]
    wrap(module, "_causal_window_mask", _of_one_text)
    wrap(module.LimiteModel, "__call__", _with_positions)
    module.LanguageModel.make_cache = _make_cache


def arrays(module: ModuleType) -> None:
    """Keeps weights in float32 that are read so."""
    module.Model.cast_predicate = property(lambda self: lambda name: _IN_FLOAT32 not in name)


def _rms_norm(x: mx.array) -> mx.array:
    return mx.fast.rms_norm(x, None, TORCH_EPSILON)


def _of_one_text(before: Callable[..., mx.array]) -> Callable[..., mx.array | None]:
    def mask(length: int, offset: Any, window: int | None, dtype: mx.Dtype) -> mx.array | None:
        # Caches of a step give an array, and apply the window themselves.
        return None if isinstance(offset, mx.array) else before(length, offset, window, dtype)

    return mask


def _with_positions(before: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def forward(self: Any, inputs: mx.array, cache: Any = None, positions: Any = None) -> mx.array:
        if positions is None:
            first = mx.array(offset_of(None if cache is None else cache[0])).reshape(-1, 1)
            positions = mx.broadcast_to(first + mx.arange(inputs.shape[1]), inputs.shape)
        return before(self, inputs, cache, positions)

    return forward


def _make_cache(self: Any) -> list[Any]:
    # The module counts a window without the query's own position.
    windows = [layer.self_attn.window for layer in self.model.layers]
    return [KVCache() if size is None else MaskedWindowCache(size + 1) for size in windows]
