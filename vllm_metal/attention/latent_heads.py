# SPDX-License-Identifier: Apache-2.0
"""Attention of one prompt by keys and values of heads, built from latents a few heads at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx_lm.models import mla

from metal_kernels.pace import Pace
from metal_kernels.paged_attention import buckets
from vllm_metal.kv_cache.latent_prompts import LatentHeads
from vllm_metal.kv_cache.layer_state import joined
from vllm_metal.mlx_patches import multi_linear

#: The most bytes of keys, values and scores that are there at once; heads have theirs in turns.
BUILT_AT_ONCE = 2**28


@dataclass(frozen=True)
class Projections:
    """A layer's, of mlx-lm's."""

    embed: Any  # latents' space from that of a head's keys: [H, rank, key]
    unembed: Any  # a head's values from latents: [H, value, rank]

    @staticmethod
    def of_zeros(heads: LatentHeads, dtype: mx.Dtype) -> Projections:
        """Projections of such heads, which give zeros."""
        made = []
        for num_outputs, num_inputs in ((heads.rank, heads.key), (heads.value, heads.rank)):
            layer = mla.MultiLinear(1, 1, 1)
            layer.weight = mx.zeros((heads.num_heads, num_outputs, num_inputs), dtype)
            made.append(layer)
        return Projections(*made)

    def heads(self, rotated: int) -> LatentHeads:
        """Their sizes, beside rotated keys of so many elements."""
        key, rank = multi_linear.sizes(self.embed)
        _, value = multi_linear.sizes(self.unembed)
        return LatentHeads(len(self.embed.weight), rank, rotated, key, value)


def attend(
    queries: mx.array,
    context: mx.array,
    projections: Projections,
    scale: float,
    pace: Pace | None = None,
) -> mx.array:
    """Causal attention of the last Q of S tokens.

    Args:
        queries: [Q, H, key + rotated].
        context: [S, rank + rotated] latents and rotated keys, of the dtype of `queries`.
        projections: what makes keys and values of latents.
        scale: factor on the scores.
        pace: ends command buffers between calls that take long; None: MLX alone ends them.

    Returns:
        [Q, H, value].
    """
    num_rows, num_heads, _ = queries.shape
    rank = multi_linear.sizes(projections.embed)[1]
    heads = projections.heads(context.shape[1] - rank)
    turn = Turn.of(heads, len(context), queries.dtype)
    outputs: list[mx.array] = []
    for first in range(0, num_heads, turn.num_heads):
        here = slice(first, min(first + turn.num_heads, num_heads))
        if pace is not None:
            work = heads.work(num_rows, len(context)) * (here.stop - here.start) // num_heads
            pace.before(work, *outputs[-1:])
        if outputs:  # so that these heads' are not built before the last ones' are gone
            context = mx.depends(context, outputs[-1])
        keys, values = _built(context, projections, here)
        rows = queries[:, here].swapaxes(0, 1)[None]
        if turn.num_rows is None:
            outputs.append(_fused(rows, keys, values, scale))
        else:
            outputs.append(_by_pieces(rows, keys, values, scale, turn.num_rows))
    return joined(outputs, axis=1)[0].swapaxes(0, 1)


@dataclass(frozen=True)
class Turn:
    """What is computed at once."""

    num_heads: int
    num_rows: int | None  # by plain operations; None: all, by a fused kernel

    @staticmethod
    def of(heads: LatentHeads, context: int, dtype: mx.Dtype) -> Turn:
        """As many heads as BUILT_AT_ONCE has room for, over so long a context."""
        key_size, value_size, num_rows = heads.key + heads.rotated, heads.value, None
        scores = 0
        if _is_fused(key_size, dtype, mx.default_device().type):
            value_size = max(key_size, value_size)
        else:
            num_rows = min(max(buckets.MAX_SCORES // context, buckets.MIN_ROWS), context)
            scores = 2 * num_rows * context * mx.float32.size  # and their weights
        # Twice: as they are built, and as they are joined or padded.
        built = 2 * context * (key_size + value_size) * dtype.size
        return Turn(min(max(BUILT_AT_ONCE // (built + scores), 1), heads.num_heads), num_rows)


def largest_call(heads: LatentHeads, context: int, num_rows: int, dtype: mx.Dtype) -> mx.array:
    """One turn of heads over a context of zeros: the most memory that any takes.

    Args:
        heads: of the layer.
        context: tokens.
        num_rows: of the step, at most.
        dtype: of the rows.
    """
    turn = Turn.of(heads, context, dtype)
    heads = heads._replace(num_heads=turn.num_heads)
    sizes = turn.num_heads, heads.key + heads.rotated
    rows = mx.zeros((min(num_rows, context, turn.num_rows or buckets.MIN_ROWS), *sizes), dtype)
    latents = mx.zeros((context, heads.rank + heads.rotated), dtype)
    return attend(rows, latents, Projections.of_zeros(heads, dtype), 1.0)


def _built(context: mx.array, projections: Projections, heads: slice) -> tuple[mx.array, mx.array]:
    """[1, h, S, key + rotated] and [1, h, S, value] of some heads."""
    rank = multi_linear.sizes(projections.embed)[1]
    latents, rotated = mx.split(context[None], [rank], axis=-1)
    keys = multi_linear.product(projections.embed, latents, heads, transpose=False)
    rotated = mx.broadcast_to(rotated, (*keys.shape[:2], rotated.shape[-1]))
    values = multi_linear.product(projections.unembed, latents, heads)
    return mx.concatenate([keys, rotated], axis=-1)[None], values[None]


@cache
def _is_fused(key_size: int, dtype: mx.Dtype, device: mx.DeviceType) -> bool:
    """Whether MLX has a fused kernel for heads of the size, on the default device, one of those."""
    rows = mx.zeros((1, 1, buckets.MIN_ROWS, key_size), dtype)
    try:
        mx.fast.scaled_dot_product_attention(
            rows, rows, rows, scale=1.0, mask="causal", force_fused=True
        )
    except ValueError:
        return False
    return True


def _fused(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """[1, h, Q, value]; MLX's kernels want values of the keys' size."""
    value_size, size = values.shape[-1], keys.shape[-1]
    if value_size < size:
        values = mx.pad(values, [(0, 0)] * 3 + [(0, size - value_size)])
    out = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=scale, mask="causal", force_fused=True
    )
    return out[..., :value_size]


def _by_pieces(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, piece: int
) -> mx.array:
    """[1, h, Q, value] by plain operations, so many rows at once, over what they see."""
    num_rows, before = queries.shape[2], keys.shape[2] - queries.shape[2]
    outputs = []
    for first in range(0, num_rows, piece):
        last = min(first + piece, num_rows)
        seen = before + last
        outputs.append(
            mx.fast.scaled_dot_product_attention(
                queries[:, :, first:last],
                keys[:, :, :seen],
                values[:, :, :seen],
                scale=scale,
                mask="causal",
            )
        )
    return joined(outputs, axis=2)
