# SPDX-License-Identifier: Apache-2.0
"""Moves states of fixed size into modules of their own.

Baichuan M1 mixes K and V with the previous token's inside its attention. LongCat with n-grams keeps
up to n - 1 previous tokens; zeros before the text have the same effect.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.patches.mlx_patches.families.forwards import attend, offset_of
from vllm_metal.patches.mlx_patches.replacing import after_init, wrap


class _Mixed(nn.Module):
    """Mixes K and V of each token with those of the previous one."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        # A namespace, because the module would register a container's content as its own modules.
        self._attention = SimpleNamespace(module=attention)

    def __call__(self, keys: mx.array, values: mx.array, cache: Any) -> dict[str, mx.array]:
        """Returns mixed keys and values, [B, L, H, D] each.

        cache: [B, H, D] K and V of the previous token; None: no previous token.
        """
        weights: Any = self._attention.module
        found = {}
        for part, (name, new, weight) in enumerate(
            (("keys", keys, weights.conv_k), ("values", values, weights.conv_v))
        ):
            last = None if cache is None else cache[part]
            last = mx.zeros_like(new[:, 0]) if last is None else last
            before = mx.concatenate([last[:, None], new[:, :-1]], axis=1)
            factors = weight.reshape(-1, 1, 2)
            found[name] = before * factors[..., 0] + new * factors[..., 1]
            if cache is not None:
                cache[part] = new[:, -1]
        return found


def baichuan_m1(module: ModuleType) -> None:
    """Mixes K and V in a separate module next to attention, so that its state has its own cache."""

    def add_mixture(layer: Any, *args: Any, **options: Any) -> None:
        layer.mixed = _Mixed(layer)

    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        state, of_attention = (None, None) if cache is None else cache
        width = self.num_kv_heads * self.head_dim
        ends = [self.hidden_size, self.hidden_size + width]
        queries, keys, values = (
            mx.unflatten(part, -1, (-1, self.head_dim))
            for part in mx.split(self.W_pack(x), ends, axis=-1)
        )
        mixed = self.mixed(keys, values, state)
        offset = offset_of(of_attention)
        queries = self.rope(queries.swapaxes(1, 2), offset=offset)
        keys = self.rope(mixed["keys"].swapaxes(1, 2), offset=offset)
        values = mixed["values"].swapaxes(1, 2)
        return attend(queries, keys, values, self.scale, of_attention, mask, self.o_proj)

    after_init(module.Attention, add_mixture)
    module.Attention.__call__ = call


def longcat_flash_ngram(module: ModuleType) -> None:
    """Keeps as many previous tokens as the longest n-gram reads."""

    def embedded(before: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, input_ids: mx.array, cache: Any = None) -> mx.array:
            count = self.n - 1
            if cache is not None and cache[0] is None:
                cache[0] = mx.zeros((len(input_ids), count), mx.int64)
            found: mx.array = before(self, input_ids, cache)
            return found

        return call

    wrap(module.NgramEmbedding, "__call__", embedded)
