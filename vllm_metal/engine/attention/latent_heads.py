# SPDX-License-Identifier: Apache-2.0
"""MLA attention of one prompt with K and V expanded from latents, a few heads at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models import mla

from metal_kernels.pace import MOST_WORK, Pace
from metal_kernels.paged_attention import buckets
from metal_kernels.paged_attention.fused import even_cuts, is_fused
from vllm_metal.engine.kv_cache.latent_prompts import LatentHeads
from vllm_metal.engine.kv_cache.layer_state import joined
from vllm_metal.patches.mlx_patches import multi_linear
from vllm_metal.patches.mlx_patches.seam import Scoring

#: Limit in bytes of the keys, values and scores of the heads that are computed together.
MAX_EXPANDED_BYTES = 2**28


@dataclass(frozen=True)
class Projections:
    """An MLA layer's projections, mlx-lm's MultiLinear."""

    embed: Any  # queries to latent space: [H, rank, key]
    unembed: Any  # latents to values: [H, value, rank]

    @staticmethod
    def of_zeros(heads: LatentHeads, dtype: mx.Dtype) -> Projections:
        made = []
        for num_outputs, num_inputs in ((heads.rank, heads.key), (heads.value, heads.rank)):
            layer = mla.MultiLinear(1, 1, 1)
            layer.weight = mx.zeros((heads.num_heads, num_outputs, num_inputs), dtype)
            made.append(layer)
        return Projections(*made)

    def heads(self, rotated: int) -> LatentHeads:
        """Returns the MLA heads' sizes; `rotated` is the number of elements with RoPE in a key."""
        key, rank = multi_linear.sizes(self.embed)
        _, value = multi_linear.sizes(self.unembed)
        return LatentHeads(len(self.embed.weight), rank, rotated, key, value)


def attend(
    queries: mx.array,
    context: mx.array,
    projections: Projections,
    scoring: Scoring,
    pace: Pace | None = None,
) -> mx.array:
    """Causal attention of the last Q of S tokens.

    Args:
        queries: [Q, H, key + rotated].
        context: [S, rank + rotated] latents and rotated keys, of the dtype of `queries`.
        projections: expand latents to keys and values.
        scoring: scale and sinks.
        pace: ends command buffers between long calls; None: only MLX ends them.

    Returns:
        [Q, H, value].
    """
    rank = multi_linear.sizes(projections.embed)[1]
    heads = projections.heads(context.shape[1] - rank)
    call = CallSize.of(heads, len(context), len(queries), queries.dtype)
    outputs: list[mx.array] = []
    for first in range(0, heads.num_heads, call.num_heads):
        here = slice(first, min(first + call.num_heads, heads.num_heads))
        rows = queries[:, here].swapaxes(0, 1)[None]
        if outputs:  # expand only after the previous heads' keys and values are freed
            context = mx.depends(context, outputs[-1])
        keys, values = _expanded(context, projections, heads.rank, here)
        share = heads._replace(num_heads=here.stop - here.start)
        sinks = None if scoring.sinks is None else scoring.sinks[here]
        own = scoring._replace(sinks=sinks)
        outputs.append(_attend_in_pieces(rows, keys, values, own, call, share, pace, outputs[-1:]))
    return joined(outputs, axis=1)[0].swapaxes(0, 1)


@dataclass(frozen=True)
class CallSize:
    """Number of heads and queries that one call computes."""

    num_heads: int
    num_rows: int
    fused: bool

    @staticmethod
    def of(heads: LatentHeads, context: int, num_rows: int, dtype: mx.Dtype) -> CallSize:
        """Chooses the largest call for `num_rows` queries within MAX_EXPANDED_BYTES and MOST_WORK.

        `dtype` is that of queries and latents.
        """
        key_size, value_size, scores = heads.key + heads.rotated, heads.value, 0
        fused = is_fused(key_size, key_size, dtype, mx.default_device().type)
        if fused:
            value_size = max(key_size, value_size)
            most = MOST_WORK // (2 * context * (key_size + value_size))
        else:
            most = buckets.MAX_SCORES // context
        num_rows = min(max(most, buckets.MIN_ROWS), num_rows)
        if not fused:
            scores = 2 * num_rows * context * mx.float32.size  # and their weights
        # Twice: after the projection, and concatenated or padded.
        built = 2 * context * (key_size + value_size) * dtype.size
        built += heads.rank * (heads.key + heads.value) * dtype.size  # matrices as values
        work = heads._replace(num_heads=1).work(num_rows, context)
        room = min(MAX_EXPANDED_BYTES // (built + scores), MOST_WORK // work)
        return CallSize(min(max(room, 1), heads.num_heads), num_rows, fused)


def largest_call(heads: LatentHeads, context: int, num_rows: int, dtype: mx.Dtype) -> mx.array:
    """Runs the call that takes the most memory in a step of up to `num_rows` queries, on zeros."""
    num_rows = min(num_rows, context)
    call = CallSize.of(heads, context, num_rows, dtype)
    if call.fused:  # its memory does not depend on the number of queries
        num_rows = min(num_rows, buckets.MIN_ROWS)
    heads = heads._replace(num_heads=call.num_heads)
    sizes = call.num_heads, heads.key + heads.rotated
    rows = mx.zeros((min(num_rows, call.num_rows), *sizes), dtype)
    latents = mx.zeros((context, heads.rank + heads.rotated), dtype)
    return attend(rows, latents, Projections.of_zeros(heads, dtype), Scoring(1.0))


def _expanded(
    context: mx.array, projections: Projections, rank: int, heads: slice
) -> tuple[mx.array, mx.array]:
    """Expands latents to keys [1, h, S, key + rotated] and values [1, h, S, value] of h heads."""
    latents, rotated = mx.split(context[None], [rank], axis=-1)
    keys = latents @ multi_linear.matrices(projections.embed, heads, context.dtype)
    rotated = mx.broadcast_to(rotated, (*keys.shape[:2], rotated.shape[-1]))
    unembed = multi_linear.matrices(projections.unembed, heads, context.dtype)
    values = latents @ unembed.swapaxes(-1, -2)
    return mx.concatenate([keys, rotated], axis=-1)[None], values[None]


def _attend_in_pieces(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scoring: Scoring,
    call: CallSize,
    heads: LatentHeads,
    pace: Pace | None,
    before: list[mx.array],
) -> mx.array:
    """Attends with `call.num_rows` queries at a time; returns [1, h, Q, value].

    Args:
        heads: sizes of the h heads.
        before: the last operation queued before, if any.
    """
    value_size, size, length = values.shape[-1], keys.shape[-1], keys.shape[2]
    if call.fused and value_size < size:  # MLX's kernels want values of the keys' size
        values = mx.pad(values, [(0, 0)] * 3 + [(0, size - value_size)])
    num_rows, outputs = queries.shape[2], list[mx.array]()
    for first, count in even_cuts(num_rows, call.num_rows):
        last = first + count
        rows, seen = queries[:, :, first:last], length - num_rows + last
        if pace is not None:
            pace.before(heads.work(last - first, seen), *(outputs[-1:] or before))
        if outputs:  # run after the previous call, whose scores are freed then
            rows = mx.depends(rows, outputs[-1])
        out = mx.fast.scaled_dot_product_attention(
            rows,
            keys[:, :, :seen],
            values[:, :, :seen],
            scale=scoring.scale,
            mask="causal",
            sinks=scoring.sinks,
            force_fused=call.fused,
        )
        outputs.append(out[..., :value_size])
    return joined(outputs, axis=2)
