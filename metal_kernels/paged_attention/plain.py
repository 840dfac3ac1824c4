# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts in plain operations, for layers without a fused kernel in MLX."""

from __future__ import annotations

from functools import partial

import mlx.core as mx


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
    softcap: float | None,
) -> mx.array:
    """Returns the attention of a context's last rows, [1, H, Q, DV].

    Args:
        queries: [1, H, Q, D].
        keys: [1, Hkv, S, D].
        values: [1, Hkv, S, DV].
        mask: [Q, S] bool, True where a row may look; None: causal.
        sinks: [H], a learned logit per head that only takes part in the softmax.
        softcap: scores become softcap * tanh(score / softcap).
    """
    # Scores have the dtype of queries, as in mlx-lm; with a soft cap, where they are large,
    # float32.
    (_, num_heads, num_rows, size), num_kv_heads = queries.shape, keys.shape[1]
    dtype, num_keys = queries.dtype, keys.shape[2]
    if mask is None:
        rows = mx.arange(num_keys - num_rows, num_keys)[:, None]
        mask = mx.arange(num_keys) <= rows
    wide = queries if softcap is None else queries.astype(mx.float32)
    factor = scale if softcap is None else scale / softcap
    # All query heads and rows of a K/V head are rows of one product.
    packed = (wide * factor).reshape(1, num_kv_heads, -1, size)
    products = packed @ keys.swapaxes(-1, -2)
    products = products.reshape(1, num_kv_heads, -1, num_rows, num_keys)
    scores = masked(products, mask) if softcap is None else capped(products, mask, softcap)
    weights = mx.softmax(scores, axis=-1, precise=True).astype(dtype)
    out = weights.reshape(1, num_kv_heads, -1, num_keys) @ values
    out = out.reshape(1, num_heads, num_rows, -1)
    if sinks is not None:
        sums = mx.logsumexp(scores.astype(mx.float32), axis=-1).reshape(1, num_heads, num_rows)
        share = mx.sigmoid(sums - sinks.astype(mx.float32)[:, None])  # of keys in the softmax sum
        out = (out * share[..., None]).astype(dtype)
    return out


@partial(mx.compile, shapeless=True)
def masked(products: mx.array, mask: mx.array) -> mx.array:
    return mx.where(mask, products, mx.array(-mx.inf, products.dtype))


@partial(mx.compile, shapeless=True)
def capped(products: mx.array, mask: mx.array, softcap: float) -> mx.array:
    return mx.where(mask, mx.tanh(products) * softcap, -mx.inf)
