# SPDX-License-Identifier: Apache-2.0
"""DeepSeek sparse attention (arXiv:2512.02556) in MLX's operations: choices, and attention.

An indexer scores each position of a token's context as sum_h w_h * relu(q_h . k), with H heads of
queries and one of keys. The token attends to the `topk` positions with the highest scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from metal_kernels.pace import Pace
from metal_kernels.paged_attention.fused import even_cuts
from vllm_metal.engine.kv_cache.layer_cache import LayerKVCache, Scoring
from vllm_metal.engine.kv_cache.layer_state import PlanT, joined
from vllm_metal.engine.kv_cache.sparse_tokens import ABSENT, SparseTokens

#: Most scores of all heads in one call, unless a single row has more: 128 MiB in float32.
MAX_SCORES = 2**25
#: Most bytes of gathered rows and scores in one call, unless a single row has more.
MAX_BYTES = 2**28


def choose(
    kv_cache: LayerKVCache[PlanT],
    plan: PlanT,
    tokens: SparseTokens,
    queries: mx.array,
    weights: mx.array,
    positions: mx.array,
    topk: int,
) -> mx.array:
    """Chooses the `topk` positions that each of t tokens attends to, after the write of keys.

    Reads each context once. Of equal scores, those at lower positions are chosen.

    Args:
        kv_cache: the indexer's keys.
        plan: of the step, with `tokens`.
        queries: [T, H, D], of all tokens of the step.
        weights: [T, H] float32, scales included.
        positions: [T] int32.

    Returns:
        [t, topk] int32 places in the pool (`places_of`), by position; ABSENT behind the last.
    """
    assert tokens.contexts is not None
    queries, weights, positions = map(tokens.of_all, (queries, weights, positions))
    found: list[mx.array] = []
    for bucket, places in zip(tokens.contexts.buckets, tokens.places, strict=True):
        rows = [
            (each if bucket.rows is None else each[bucket.rows]).reshape(
                bucket.num_requests, bucket.query_len, *each.shape[1:]
            )
            for each in (queries, weights, positions)
        ]
        keys = kv_cache.keys_of(plan, bucket)[0].astype(mx.float32)
        chosen = _choose_of(keys, places, rows, topk, tokens.pace)
        found.append(chosen.reshape(-1, topk))
    chosen, order = joined(found), tokens.contexts.order
    return chosen if order is None else chosen[order]


def _choose_of(
    keys: mx.array, places: mx.array, rows: Sequence[mx.array], topk: int, pace: Pace | None
) -> mx.array:
    """Returns [n, Q, topk] places for n requests with [n, S, D] keys and [n, S] places.

    `rows` are [n, Q, H, D] queries, [n, Q, H] weights and [n, Q] positions.
    """
    (n, num_rows, num_heads, size), num_slots = rows[0].shape, keys.shape[1]
    most = max(MAX_SCORES // (n * num_slots * num_heads), 1)
    found: list[mx.array] = []
    for first, rows_here in even_cuts(num_rows, most):
        queries, weights, positions = (each[:, first : first + rows_here] for each in rows)
        if pace is not None:
            pace.before(2 * n * rows_here * num_heads * num_slots * size, *found[-1:])
        if found:  # run after the previous call, whose scores are freed then
            queries = mx.depends(queries, found[-1])
        packed = queries.astype(mx.float32).reshape(n, rows_here * num_heads, size)
        scores = mx.maximum(packed @ keys.swapaxes(-1, -2), 0)
        scores = scores.reshape(n, rows_here, num_heads, num_slots)
        total = (weights[:, :, None] @ scores)[:, :, 0]
        visible = mx.arange(num_slots) <= positions[..., None]
        total = mx.where(visible, total, -mx.inf)  # also where keys behind the context are NaN
        found.append(largest(total, mx.broadcast_to(places[:, None], total.shape), topk))
    return joined(found, axis=1)


def largest(scores: mx.array, values: mx.array, topk: int) -> mx.array:
    """Returns [..., topk] of [..., S] values, those with the largest scores, in order of S.

    Scores of minus infinity are never chosen; ABSENT replaces what is missing, at the end. Of equal
    scores, the first are chosen.
    """
    # A full sort by score and position would take another array of indices, and MLX does not state
    # that its sorts are stable.
    index = scores.shape[-1] - topk
    least = mx.partition(scores, index, axis=-1)[..., index : index + 1]
    above = scores > least
    equal = (scores == least) & (scores > -mx.inf)
    room = topk - above.sum(axis=-1, keepdims=True)
    chosen = above | (equal & (_ranks(equal) <= room))
    target = mx.where(chosen, _ranks(chosen) - 1, topk)  # one past the last: dropped
    found = mx.full((*scores.shape[:-1], topk + 1), ABSENT, values.dtype)
    return mx.put_along_axis(found, target, values, axis=-1)[..., :topk]


def _ranks(flags: mx.array) -> mx.array:
    return mx.cumsum(flags.astype(mx.int32), axis=-1)


def attend(
    kv_cache: LayerKVCache[PlanT],
    plan: PlanT,
    queries: mx.array,
    places: mx.array,
    scoring: Scoring,
    pace: Pace | None,
) -> mx.array:
    """Attends with t tokens' queries to the latents at the chosen places, which are read once.

    Args:
        kv_cache: MLA latents.
        queries: [t, H, D], in the space of the latents.
        places: [t, topk] int32 from `choose`.
        scoring: scale and sinks.

    Returns:
        [t, H, value_size].
    """
    if pace is not None:
        pace.end(places)  # the layers before
    most = rows_per_call(queries, places.shape[1])
    outputs: list[mx.array] = []
    for first, num_rows in even_cuts(len(places), most):
        rows, some = (each[first : first + num_rows] for each in (queries, places))
        if pace is not None:
            _, num_heads, size = rows.shape
            work_here = some.size * work(num_heads, size, kv_cache.value_size)
            pace.before(work_here, *outputs[-1:])
        if outputs:  # gather only after the previous call, whose rows are freed then
            some = mx.depends(some, outputs[-1])
        keys = kv_cache.keys_at(plan, some).astype(rows.dtype)
        scores = (rows * scoring.scale) @ keys.swapaxes(-1, -2)
        scores = mx.where((some != ABSENT)[:, None], scores, mx.array(-mx.inf, scores.dtype))
        shares = _shares(scores, scoring.sinks)
        outputs.append(shares @ keys[..., : kv_cache.value_size])
    return joined(outputs)


def _shares(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Returns the weights of [t, H, topk] scores; sinks take their part of the softmax."""
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    column = mx.broadcast_to(sinks.astype(scores.dtype)[:, None], (*scores.shape[:2], 1))
    shares = mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)
    return shares[..., :-1]


def rows_per_call(queries: mx.array, topk: int) -> int:
    """Returns the number of tokens that attend in one call."""
    _, num_heads, size = queries.shape
    # Rows of the pool, of the step, and twice both; products, scores and their weights, and scores
    # beside a sink.
    row = 4 * size * queries.dtype.size + 4 * num_heads * mx.float32.size
    return max(MAX_BYTES // (topk * row), 1)


def work(num_heads: int, size: int, value_size: int) -> int:
    """Returns the FLOPs of attention per token and chosen position."""
    return 2 * num_heads * (size + value_size)
