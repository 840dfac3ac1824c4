# SPDX-License-Identifier: Apache-2.0
"""Keeps the sums and the inputs of Z1T's layers in caches, and its positions.

A layer divides one sum over all tokens by another (AFT-conv, Zhai et al. 2021, arXiv:2105.14103):
exp(k) * v by exp(k), with larger weights for the newest tokens. Both are kept in one array, with
the denominator's terms after the numerator's, and in float32: bfloat16 would drop new terms.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from vllm_metal.patches.mlx_patches.replacing import wrap

_LEAST = 1e-6  # added to the denominator


class CountingArraysCache(ArraysCache):
    """The dense cache of a layer with states, of a model that asks it for positions."""

    offset: int = 0


def language(module: ModuleType) -> None:
    """Computes sums from states, and adds each text's positions to its embeddings."""
    wrap(module.AFTConv, "__call__", _mix)
    wrap(module.SparseLinear, "__call__", _of_rows)
    wrap(module.Z1TModel, "_pos", _positions)
    wrap(module.Z1TModel, "__call__", _counting)
    module.LanguageModel.make_cache = _make_cache


def _make_cache(self: Any) -> list[Any]:
    return [CountingArraysCache(2) for _ in self.model.layers]


def _mix(before: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(self: Any, x: mx.array, cache: Any = None) -> mx.array:
        if cache is None:
            return before(self, x)
        projected = self.qkv_proj(x)
        if self.tanh_linear:
            projected = mx.tanh(projected)
        queries, values, keys = mx.split(projected, [self.dim, 2 * self.dim], axis=-1)
        factors = mx.exp(mx.tanh(keys))[..., None]
        values = mx.unflatten(values, -1, (self.heads, -1))
        terms = mx.concatenate([factors * values, factors], axis=-1).astype(mx.float32)
        shape = (len(x), self.ksize - 1, *terms.shape[2:])
        inputs = mx.zeros(shape) if cache[1] is None else cache[1]
        inputs = mx.concatenate([inputs, terms], axis=1)
        sums = mx.cumsum(terms, axis=1)
        if cache[0] is not None:
            sums = sums + cache[0][:, None]
        cache[0], cache[1] = sums[:, -1], inputs[:, x.shape[1] :]
        kernel = (mx.exp(self.w_conv.astype(mx.float32)) - 1)[..., None]
        for tap in range(self.ksize):
            sums = sums + kernel[:, tap] * inputs[:, tap : tap + x.shape[1]]
        mixed = (sums[..., :-1] / (sums[..., -1:] + _LEAST)).flatten(2).astype(x.dtype)
        out: mx.array = self.out_proj(mx.tanh(queries) * mixed)
        return mx.tanh(out) if self.tanh_linear else out

    return attention


def _of_rows(before: Callable[..., mx.array]) -> Callable[..., mx.array]:
    # The module limits its gathers by the length of a text, and a step's texts have one token.
    def product(self: Any, x: mx.array) -> mx.array:
        rows = before(self, x.reshape(1, -1, x.shape[-1]))
        return rows.reshape(*x.shape[:-1], -1)

    return product


def _positions(before: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def rows(self: Any, offset: Any, length: int, dtype: mx.Dtype) -> mx.array:
        if not isinstance(offset, mx.array):
            return before(self, offset, length, dtype)
        positions = offset[:, None] + mx.arange(length)
        size = self.pe.shape[0]
        found = self.pe[mx.minimum(positions, size - 1)]
        return mx.where((positions < size)[..., None], found, 0).astype(dtype)

    return rows


def _counting(before: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def forward(
        self: Any, inputs: mx.array, inputs_embeds: Any = None, cache: Any = None, **options: Any
    ) -> mx.array:
        out = before(self, inputs, inputs_embeds, cache, **options)
        for each in cache or ():
            if isinstance(each, CountingArraysCache):
                each.offset += inputs.shape[1]
        return out

    return forward
