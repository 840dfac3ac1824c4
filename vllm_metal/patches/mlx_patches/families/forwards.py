# SPDX-License-Identifier: Apache-2.0
"""Shares parts of patched forwards: heads, attention, and a pass through the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.base import create_attention_mask


def heads(
    layer: Any, x: mx.array, width: int, names: Sequence[str] = ("q_proj", "k_proj", "v_proj")
) -> tuple[mx.array, ...]:
    """Projects x, [B, L, hidden], with each named projection of a layer, to [B, H, L, width]."""
    return tuple(mx.unflatten(layer[name](x), -1, (-1, width)).swapaxes(1, 2) for name in names)


def offset_of(cache: Any) -> Any:
    """Returns the position of each text's first row, an integer or [B] int32; 0 without a cache."""
    return 0 if cache is None else cache.offset


def joined(mixed: mx.array) -> mx.array:
    """Concatenates heads: maps [B, H, L, D] to [B, L, H * D]."""
    return mixed.swapaxes(1, 2).flatten(2)


def attend(
    queries: mx.array,  # [B, H, L, D]
    keys: Any,  # [B, Hkv, L, D]
    values: Any,  # [B, Hkv, L, DV]
    scale: float,
    cache: Any,  # None: the rows are the whole text
    mask: Any,  # as for mlx-lm's function
    project: Callable[[mx.array], mx.array],  # the layer's last projection
) -> mx.array:
    """Adds K and V to the cache, attends to all of its rows, and returns [B, L, hidden]."""
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    mixed = base.scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask
    )
    return project(joined(mixed))


def through(
    layers: Sequence[Any],
    hidden: mx.array,  # [B, L, hidden]
    cache: Sequence[Any] | None,  # one per layer; None: the rows are whole texts
    norm: Callable[[mx.array], mx.array],
    window: int | None = None,  # positions that a token sees; None: all before it
    masked: int = 0,  # index of the layer whose cache determines the mask
) -> mx.array:
    """Runs layers with one mask and the final norm; returns [B, L, hidden]."""
    caches = [None] * len(layers) if cache is None else cache
    mask = create_attention_mask(hidden, caches[masked], window)
    for layer, of_layer in zip(layers, caches, strict=True):
        hidden = layer(hidden, mask=mask, cache=of_layer)
    return norm(hidden)
