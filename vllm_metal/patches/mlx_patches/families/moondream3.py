# SPDX-License-Identifier: Apache-2.0
"""Lets paged caches compute Moondream 3's attention, for which mlx-vlm calls MLX's function.

Text attends to earlier text. Only an image, which stands first, attends to its later tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx

from vllm_metal.patches.mlx_patches.families.arrays import Arrays
from vllm_metal.patches.mlx_patches.families.forwards import attend
from vllm_metal.patches.mlx_patches.replacing import wrap
from vllm_metal.patches.mlx_patches.seam import AttendingCache

_TEXT, _OURS = "text.", "language_model."


def language(module: ModuleType) -> None:
    """Lets caches attend; each text of a step has a position of its own."""
    wrap(module.Attention, "__call__", _attend)


def arrays(module: ModuleType) -> None:
    """Reads the text model's arrays under the name that the adapter gives it."""
    del module.Model.language_model  # a property with the module's own name of the text model
    wrap(module.Model, "sanitize", _renamed)


def _attend(dense: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not isinstance(cache, AttendingCache):
            return dense(self, x, mask, cache)
        packed = self.qkv(x)
        positions = cache.offset[:, None] + mx.arange(x.shape[1])
        of_queries, of_values = self.tau(packed, positions)
        heads = mx.unflatten(packed, -1, (-1, self.head_dim)).swapaxes(1, 2)
        ends = [self.n_heads, self.n_heads + self.n_kv_heads]
        queries, keys, values = mx.split(heads, ends, axis=1)
        queries = self.rope(queries * of_queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        return attend(queries, keys, values * of_values, self.scale, cache, mask, self.proj)

    return attention


def _renamed(before: Callable[..., Arrays]) -> Callable[..., Arrays]:
    def sanitize(self: Any, weights: Arrays) -> Arrays:
        return {
            f"{_OURS}{name.removeprefix(_TEXT)}" if name.startswith(_TEXT) else name: array
            for name, array in before(self, weights).items()
        }

    return sanitize
