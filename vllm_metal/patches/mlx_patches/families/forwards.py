# SPDX-License-Identifier: Apache-2.0
"""What patched forwards have in common: heads, attention, and a pass through the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models.base import create_attention_mask


def heads(
    layer: Any, x: mx.array, width: int, names: Sequence[str] = ("q_proj", "k_proj", "v_proj")
) -> tuple[mx.array, ...]:
    """[B, H, L, width] of each projection of a layer.

    Args:
        layer: of mlx-lm's.
        x: [B, L, hidden].
        width: of a head.
        names: of the projections.
    """
    return tuple(mx.unflatten(layer[name](x), -1, (-1, width)).swapaxes(1, 2) for name in names)


def offset_of(cache: Any) -> Any:
    """The place of a text's first row: a number, or [B] int32; 0 without a cache."""
    return 0 if cache is None else cache.offset


def joined(mixed: mx.array) -> mx.array:
    """[B, L, H * D] of [B, H, L, D]."""
    return mixed.swapaxes(1, 2).flatten(2)


def attend(
    queries: mx.array,
    keys: Any,
    values: Any,
    scale: float,
    cache: Any,
    mask: Any,
    project: Callable[[mx.array], mx.array],
) -> mx.array:
    """Attention over what the cache has of the text, and these rows.

    Args:
        queries: [B, H, L, D].
        keys: [B, Hkv, L, D].
        values: [B, Hkv, L, DV].
        scale: factor of the scores.
        cache: of the layer; None: the rows are the whole text.
        mask: as mlx-lm's function takes it.
        project: the layer's last projection.

    Returns:
        [B, L, hidden].
    """
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    mixed = base.scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask
    )
    return project(joined(mixed))


def through(
    layers: Sequence[Any],
    hidden: mx.array,
    cache: Sequence[Any] | None,
    norm: Callable[[mx.array], mx.array],
    window: int | None = None,
    masked: int = 0,
) -> mx.array:
    """[B, L, hidden] behind layers that have one mask, and the norm behind them.

    Args:
        layers: of mlx-lm's.
        hidden: [B, L, hidden] before them.
        cache: of each layer; None: the rows are whole texts.
        norm: after the last layer.
        window: positions that a token sees; None: all before it.
        masked: the layer by whose cache the mask is made.
    """
    caches = [None] * len(layers) if cache is None else cache
    mask = create_attention_mask(hidden, caches[masked], window)
    for layer, of_layer in zip(layers, caches, strict=True):
        hidden = layer(hidden, mask=mask, cache=of_layer)
    return norm(hidden)
