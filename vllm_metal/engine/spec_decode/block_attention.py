# SPDX-License-Identifier: Apache-2.0
"""Attention of block drafters: the cache holds K/V of the context and of the drafted blocks.

The target's step writes the context's K/V: rope(k_norm(k_proj(c))) and v_proj(c), where c is the
projection of the target's hidden states. A drafter's pass writes the same of its own hidden states.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.spec_decode.block_config import BlockConfig
from vllm_metal.patches.mlx_patches.seam import AttendingCache, Scoring


class BlockAttention(nn.Module):
    """Replaces the attention of mlx-vlm's drafter layers, with the same arguments and weights."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size, head_dim, bias = config.hidden_size, config.head_dim, config.attention_bias
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim, self._value_scale = head_dim, config.value_scale
        self._score_scale = config.attention_scale or head_dim**-0.5
        self._eps = config.rms_norm_eps
        self.q_proj = nn.Linear(size, config.num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_kv_heads * head_dim, bias=bias)
        if not config.keys_are_values:
            self.v_proj = nn.Linear(size, config.num_kv_heads * head_dim, bias=bias)
        if config.is_laguna:
            self.g_proj = nn.Linear(size, config.num_heads, bias=False)
        self.o_proj = nn.Linear(config.num_heads * head_dim, size, bias=bias)
        self.q_norm = nn.RMSNorm(head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(head_dim, config.rms_norm_eps)
        if config.sinks:
            self.attention_sink_bias = mx.zeros(config.num_heads)

    def write(
        self, rows: mx.array, rope: Any, cache: AttendingCache, positions: mx.array | None = None
    ) -> Any:
        """Writes the K/V of [T, H] hidden states; returns the keys and values to pass to `attend`.

        `positions` are [T] int32; None: the cache's own.
        """
        projected = self.k_proj(rows).reshape(len(rows), self._num_kv_heads, 1, -1)
        keys = self.k_norm(projected)
        if "v_proj" in self:
            values = self.v_proj(rows).reshape(len(rows), self._num_kv_heads, 1, -1)
        else:
            values = mx.fast.rms_norm(projected, None, self._eps)
        if self._value_scale is not None:
            values = values * self._value_scale
        offset = cache.offset if positions is None else positions
        return cache.update_and_fetch(rope(keys, offset=offset), values)

    def __call__(
        self,
        x: mx.array,
        x_ctx: None,
        rope: Any,
        cache: AttendingCache,
        projected_context: None = None,
    ) -> mx.array:
        """Attends from R blocks of L tokens to their contexts and themselves; returns [R, L, H].

        Args:
            x: [R, L, H] hidden states; a block is a request's newest token and its mask tokens.
            x_ctx, projected_context: unused; the cache already holds the context's K/V.
            rope: rotates queries and keys by `cache.offset`.
            cache: the layer's, for the R * L tokens of the blocks.
        """
        rows = x.flatten(0, 1)
        queries = self.q_norm(self.q_proj(rows).reshape(len(rows), self._num_heads, 1, -1))
        queries = rope(queries, offset=cache.offset)  # before the write, which can rotate both
        keys, values = self.write(rows, rope, cache)
        scoring = Scoring(self._score_scale, self.get("attention_sink_bias"))
        out = cache.attend(queries, keys, values, scoring)
        if "g_proj" in self:  # one gate for each head
            gate = nn.softplus(self.g_proj(rows).astype(mx.float32)).astype(out.dtype)
            out = out.reshape(len(rows), self._num_heads, -1) * gate[..., None]
        return self.o_proj(out.reshape(*x.shape[:2], -1))


class CastingCache(AttendingCache):
    """Casts queries, keys and values to the pool's dtype, and outputs back to the drafter's."""

    def __init__(self, cache: AttendingCache, dtype: mx.Dtype) -> None:
        self._cache, self._dtype = cache, dtype

    @property
    def offset(self) -> mx.array:
        return self._cache.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        cast = keys.astype(self._dtype), values.astype(self._dtype)
        return self._cache.update_and_fetch(*cast)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scoring: Scoring
    ) -> mx.array:
        out = self._cache.attend(queries.astype(self._dtype), keys, values, scoring)
        return out.astype(queries.dtype)
