# SPDX-License-Identifier: Apache-2.0
"""Keeps the tokens that n-grams reach back to, as the state of a convolution.

Steps write and restore it as any recurrent state: chunks, hits of the prefix cache, rejected drafts
and preemption need nothing of their own.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from vllm_metal.patches.mlx_patches.recurrences import SequenceCall

#: Columns of the state with the tokens before: the kernels' fewest channels.
_COLUMNS = 8


def tokens_before(tokens: mx.array, cache: Any, count: int, weight: mx.array) -> list[mx.array]:
    """Returns [B, L] int64 for each distance from 1 to `count`: the tokens before each token.

    They are a convolution's state: float32 is exact up to 2**24, and before a text it is zero.

    Args:
        tokens: [B, L] integers.
        cache: the layer's state, an `ArraysCache` or a `SequenceCall`; None: texts begin here.
        count: tokens to look back.
        weight: any weight of the layer.
    """
    rows = mx.broadcast_to(
        tokens.astype(mx.float32)[..., None], (*tokens.shape, max(count, _COLUMNS))
    )
    if isinstance(cache, SequenceCall):
        # `fit` records operations, compiled ones among them, only if they depend on weights.
        rows = mx.depends(rows, weight)
        # Column n of the result is the token n + 1 places before; the newest tap is the last.
        places = count - 1 - mx.arange(rows.shape[-1])
        taps = (mx.arange(count + 1) == places[:, None]).astype(mx.float32)
        shifted = cache.convolve(rows[0], taps, None)[None]
        found = [shifted[..., distance] for distance in range(count)]
    else:
        rows = after_state(rows, cache, 0, count)
        length = tokens.shape[1]
        found = [rows[:, count - n : count - n + length, 0] for n in range(1, count + 1)]
    return [each.astype(mx.int64) for each in found]


def after_state(rows: mx.array, cache: Any, part: int, count: int) -> mx.array:
    """Puts [B, count, C] rows of a state before [B, L, C] rows, and keeps the last `count`."""
    state = None if cache is None else cache[part]
    if state is None:
        state = mx.zeros((len(rows), count, rows.shape[-1]), rows.dtype)
    rows = mx.concatenate([state, rows], axis=1)
    if cache is not None:
        cache[part] = mx.contiguous(rows[:, -count:])
    return rows
