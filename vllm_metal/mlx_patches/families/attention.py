# SPDX-License-Identifier: Apache-2.0
"""What patched attention layers have in common: K and V into the cache, attention, temperatures."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import base


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, cache: Any, mask: Any
) -> mx.array:
    """Attention over what the cache has of the text, and these rows.

    Args:
        queries: [B, H, L, D].
        keys: [B, Hkv, L, D].
        values: [B, Hkv, L, DV].
        scale: factor of the scores.
        cache: of the layer; None: the rows are the whole text.
        mask: as mlx-lm's function takes it.

    Returns:
        [B, H, L, DV].
    """
    if cache is not None:
        keys, values = cache.update_and_fetch(keys, values)
    out: mx.array = base.scaled_dot_product_attention(
        queries, keys, values, cache=cache, scale=scale, mask=mask
    )
    return out


def joined(heads: mx.array) -> mx.array:
    """[B, H, L, D] as [B, L, H * D]."""
    return heads.swapaxes(1, 2).flatten(2)


def temperatures(offset: Any, length: int, floor_scale: float, scale: float) -> mx.array:
    """Llama 4's factors of queries by their places in a text (its `attn_temperature_tuning`).

    Args:
        offset: place of the first row; [B] int32, where texts differ.
        length: L, rows of each text.
        floor_scale: tokens of one step.
        scale: how fast factors grow.

    Returns:
        [B, 1, L, 1] float32, or [1, 1, L, 1].
    """
    places = mx.array(offset).reshape(-1, 1, 1, 1) + mx.arange(1, length + 1)[:, None]
    return mx.log1p(mx.floor(places / floor_scale)) * scale + 1.0
