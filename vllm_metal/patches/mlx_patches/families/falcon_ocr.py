# SPDX-License-Identifier: Apache-2.0
"""Computes Falcon OCR's norms as the code that trained it, and reads converted files.

mlx-vlm's module repeats K and V for the queries' heads, since images rotate each head by
frequencies of its own; text does not. It has weights of one in float32 for norms without weights,
which would make all activations float32.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from vllm_metal.patches.mlx_patches.families.arrays import Arrays
from vllm_metal.patches.mlx_patches.families.norms import TORCH_EPSILON
from vllm_metal.patches.mlx_patches.replacing import after_init, wrap

_TABLES = ("cos_1d", "sin_1d")
_PREFIX = "language_model."  # prefix of arrays that mlx-vlm has converted


def language(module: ModuleType) -> None:
    """Leaves K and V unrepeated, corrects norms, and creates caches if none are given."""
    after_init(module.Attention, _attention)
    after_init(module.MLP, _mlp)
    after_init(module.FalconOCRTransformerModel, _compute_tables)
    wrap(module.FalconOCRTransformerModel, "__call__", _with_caches)


def arrays(module: ModuleType) -> None:
    """Leaves arrays that were converted before as they are."""
    wrap(module.Model, "sanitize", _converted_once)


def _attention(layer: Any, args: Any) -> None:
    layer.n_rep, layer.eps = 1, TORCH_EPSILON
    layer._norm_w_in = layer._norm_w_qk = None


def _mlp(layer: Any, args: Any) -> None:
    layer.eps, layer._norm_w = TORCH_EPSILON, None


def _with_caches(before: Callable[..., mx.array]) -> Callable[..., mx.array]:
    # Without caches, the module would mask nothing.
    def forward(self: Any, inputs: mx.array, cache: Any = None, **options: Any) -> mx.array:
        caches = [KVCache() for _ in self.layers] if cache is None else cache
        return before(self, inputs, cache=caches, **options)

    return forward


def _compute_tables(model: Any, args: Any, config: Any) -> None:
    # Converted files have RoPE's tables in the weights' dtype.
    for name in _TABLES:
        object.__setattr__(model, name, model.pop(name))


def _converted_once(before: Callable[..., Arrays]) -> Callable[..., Arrays]:
    def sanitize(self: Any, weights: Arrays) -> Arrays:
        is_converted = any(name.startswith(_PREFIX) for name in weights)
        return weights if is_converted else before(self, weights)

    return sanitize
