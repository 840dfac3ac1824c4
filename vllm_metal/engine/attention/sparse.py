# SPDX-License-Identifier: Apache-2.0
"""Attention to chosen positions in MLX's operations: choices, and attention.

An indexer has H heads of queries and one of keys. By DeepSeek sparse attention (arXiv:2512.02556)
it scores each position of a token's context as sum_h w_h * relu(q_h . k), and all heads of the
attention attend to the `topk` positions with the highest scores. In MiniMax M3, each of its heads
chooses blocks of positions for as many heads of the attention: see `BlockChoice`. In GLM-5.3, a
pooled key stands for a group of positions: see `GroupChoice`.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from metal_kernels.pace import Pace
from metal_kernels.paged_attention.fused import even_cuts
from vllm_metal.engine.kv_cache.layer_cache import LayerKVCache, Scoring
from vllm_metal.engine.kv_cache.layer_state import PlanT, joined
from vllm_metal.engine.kv_cache.sparse_tokens import ABSENT, SparseTokens
from vllm_metal.patches.mlx_patches.seam import BlockChoice, Choice, GroupChoice

#: Most scores of all heads in one call, unless a single row has more: 128 MiB in float32.
MAX_SCORES = 2**25
#: Most bytes of gathered rows and scores in one call, unless a single row has more.
MAX_BYTES = 2**28


def choose(
    kv_cache: LayerKVCache[PlanT],
    plan: PlanT,
    tokens: SparseTokens,
    queries: mx.array,
    weights: mx.array | None,
    positions: mx.array,
    choice: Choice,
) -> mx.array:
    """Chooses the positions that each of t tokens attends to, after the write of keys.

    Reads each context once. If scores are equal, those at lower positions are chosen.

    Args:
        kv_cache: the indexer's keys.
        plan: of the step, with `tokens`.
        queries: [T, H, D], of all tokens of the step.
        weights: [T, H] float32, scales included; None: all 1, or a choice of blocks.
        positions: [T] int32.
        choice: number of positions to choose (`topk`), blocks or groups.

    Returns:
        [t, C, topk] int32 positions in order; ABSENT behind the last. C is 1, or H with a choice of
        blocks; topk counts positions, also of blocks and groups.
    """
    given = [positions, queries] if weights is None else [positions, queries, weights]
    given = [tokens.of_all(each) for each in given]
    found: list[mx.array] = []
    for bucket in tokens.contexts.buckets:
        rows = [
            (each if bucket.rows is None else each[bucket.rows]).reshape(
                bucket.num_requests, bucket.query_len, *each.shape[1:]
            )
            for each in given
        ]
        keys = kv_cache.keys_of(plan, bucket)[0].astype(mx.float32)
        if isinstance(choice, GroupChoice):
            keys = _pooled(keys, choice)
        found.append(_choose_of(keys, rows, choice, tokens.pace).flatten(0, 1))
    chosen, order = joined(found), tokens.contexts.order
    return chosen if order is None else chosen[order]


def _choose_of(
    keys: mx.array,
    given: Sequence[mx.array],
    choice: Choice,
    pace: Pace | None,
) -> mx.array:
    """Returns [n, Q, C, topk] positions of n requests.

    Args:
        keys: [n, S, D], the index keys of S positions of each request, or of S groups of them.
        given: [n, Q] positions of the queries, [n, Q, H, D] queries, and [n, Q, H] weights if there
            are any.
        choice: see `choose`, also for C.
        pace: ends command buffers between long calls.
    """
    (n, num_rows, num_heads, size), num_slots = given[1].shape, keys.shape[1]
    most = max(MAX_SCORES // (n * num_slots * num_heads), 1)
    found: list[mx.array] = []
    for first, rows_here in even_cuts(num_rows, most):
        positions, queries, *others = (each[:, first : first + rows_here] for each in given)
        if pace is not None:
            pace.before(2 * n * rows_here * num_heads * num_slots * size, *found[-1:])
        if found:  # run after the previous call, whose scores are freed then
            queries = mx.depends(queries, found[-1])
        packed = queries.astype(mx.float32).reshape(n, rows_here * num_heads, size)
        scores = (packed @ keys.swapaxes(-1, -2)).reshape(n, rows_here, num_heads, num_slots)
        found.append(_chosen_by(scores, *others, positions=positions, choice=choice))
    return joined(found, axis=1)


def _chosen_by(
    scores: mx.array, weights: mx.array | None = None, *, positions: mx.array, choice: Choice
) -> mx.array:
    """Returns [n, Q, C, topk] positions by [n, Q, H, S] products of queries and keys."""
    if isinstance(choice, BlockChoice):
        return _chosen_blocks(scores, positions, choice)
    scores = mx.maximum(scores, 0)
    total = scores.sum(2, keepdims=True) if weights is None else weights[:, :, None] @ scores
    if isinstance(choice, GroupChoice):
        return _chosen_groups(total, positions, choice)
    return largest(_seen(total, positions), choice)


def _seen(scores: mx.array, positions: mx.array) -> mx.array:
    """Replaces [n, Q, C, S] scores of positions behind the rows' own, [n, Q], by -inf.

    They may be NaN.
    """
    visible = mx.arange(scores.shape[-1]) <= positions[..., None, None]
    return mx.where(visible, scores, -mx.inf)


def _chosen_blocks(scores: mx.array, positions: mx.array, blocks: BlockChoice) -> mx.array:
    """Returns [n, Q, H, topk * size] positions of the blocks that [n, Q, H, S] scores choose."""
    n, num_rows, num_heads, num_slots = scores.shape
    num_blocks = -(-num_slots // blocks.size)
    missing = num_blocks * blocks.size - num_slots
    scores = mx.pad(
        _seen(scores, positions), [(0, 0)] * 3 + [(0, missing)], constant_values=-mx.inf
    )
    best = scores.reshape(n, num_rows, num_heads, num_blocks, blocks.size).max(axis=-1)
    numbers = mx.arange(num_blocks, dtype=mx.int32)
    own = (positions // blocks.size)[..., None, None]
    best = mx.where((numbers <= own) & (numbers > own - blocks.num_local), mx.inf, best)
    return _chosen_ranges(best, positions, blocks.size, blocks.topk)


def _pooled(rows: mx.array, groups: GroupChoice) -> mx.array:
    """Returns [n, G, D] keys of the whole groups of [n, S, row]; NaN where a row is."""
    num_groups = rows.shape[1] // groups.size
    whole = rows[:, : num_groups * groups.size]
    return groups.pooled(mx.unflatten(whole, 1, (num_groups, groups.size)))


def _chosen_groups(scores: mx.array, positions: mx.array, groups: GroupChoice) -> mx.array:
    """Returns [n, Q, 1, num_positions] positions of the groups that [n, Q, 1, G] scores choose.

    The positions after the last whole group before a row count as a group that is always chosen; it
    may be empty.
    """
    numbers = mx.arange(scores.shape[-1] + 1, dtype=mx.int32)
    num_whole = ((positions + 1) // groups.size)[..., None, None]
    padded = mx.pad(scores, [(0, 0)] * 3 + [(0, 1)])
    best = mx.where(numbers < num_whole, padded, -mx.inf)  # they may be NaN
    best = mx.where(numbers == num_whole, mx.inf, best)
    found = _chosen_ranges(best, positions, groups.size, groups.topk + 1)
    return found[..., : groups.num_positions]


def _chosen_ranges(scores: mx.array, positions: mx.array, size: int, topk: int) -> mx.array:
    """Returns [n, Q, C, topk * size] positions of the ranges with the largest [n, Q, C, N] scores.

    A range has `size` positions. Those after a row's own are ABSENT, as are missing ranges.
    """
    chosen = largest(scores, topk)[..., None]
    expanded = chosen * size + mx.arange(size, dtype=mx.int32)
    seen = (chosen != ABSENT) & (expanded <= positions[..., None, None, None])
    return mx.where(seen, expanded, ABSENT).flatten(-2)


def largest(scores: mx.array, topk: int) -> mx.array:
    """Returns [..., topk] int32 indices of the largest of [..., S] scores, in order.

    Scores of minus infinity are never chosen; ABSENT replaces what is missing, at the end. If
    scores are equal, the first are chosen.
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
    found = mx.full((*scores.shape[:-1], topk + 1), ABSENT, mx.int32)
    numbers = mx.broadcast_to(mx.arange(scores.shape[-1], dtype=mx.int32), scores.shape)
    return mx.put_along_axis(found, target, numbers, axis=-1)[..., :topk]


def _ranks(flags: mx.array) -> mx.array:
    return mx.cumsum(flags.astype(mx.int32), axis=-1)


def attend(
    kv_cache: LayerKVCache[PlanT],
    plan: PlanT,
    queries: mx.array,
    read_slots: mx.array,
    scoring: Scoring,
    pace: Pace | None,
) -> mx.array:
    """Attends with t tokens' queries to the K and V in the chosen slots, which are read once.

    Args:
        kv_cache: K and V, or MLA latents.
        queries: [t, H, D]; with latents, in their space.
        read_slots: [t, C, topk] int32, those of chosen positions, each for H / C heads.
        scoring: scale and sinks.

    Returns:
        [t, H, value_size].
    """
    if pace is not None:
        pace.end(read_slots)  # the layers before
    num_kv_heads = len(kv_cache.keys.elements)
    if (repeats := num_kv_heads // read_slots.shape[1]) > 1:
        read_slots = mx.repeat(read_slots, repeats, axis=1)
    most = rows_per_call(kv_cache, queries, *read_slots.shape[1:])
    outputs: list[mx.array] = []
    for first, num_rows in even_cuts(len(read_slots), most):
        rows, some = (each[first : first + num_rows] for each in (queries, read_slots))
        if pace is not None:
            _, num_heads, size = rows.shape
            per_head = num_rows * some.shape[-1]
            work_here = per_head * work(num_heads, size, kv_cache.value_size)
            pace.before(work_here, *outputs[-1:])
        if outputs:  # gather only after the previous call, whose rows are freed then
            some = mx.depends(some, outputs[-1])
        keys, values = (each.astype(rows.dtype) for each in kv_cache.rows_at(plan, some))
        grouped = mx.unflatten(rows * scoring.scale, 1, (some.shape[1], -1))
        scores = grouped @ keys.swapaxes(-1, -2)
        seen = (some != ABSENT)[:, :, None]
        scores = mx.where(seen, scores, mx.array(-mx.inf, scores.dtype))
        outputs.append((_shares(scores, scoring.sinks) @ values).flatten(1, 2))
    return joined(outputs)


def _shares(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Returns the weights of [t, C, H / C, topk] scores; [H] sinks take part in the softmax."""
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    shape = scores.shape[:-1]
    column = mx.broadcast_to(sinks.astype(scores.dtype).reshape(shape[1:]), shape)[..., None]
    shares = mx.softmax(mx.concatenate([scores, column], axis=-1), axis=-1, precise=True)
    return shares[..., :-1]


def rows_per_call(
    kv_cache: LayerKVCache[PlanT], queries: mx.array, num_choices: int, topk: int
) -> int:
    """Returns the number of tokens that attend in one call."""
    num_heads, itemsize = queries.shape[1], queries.dtype.size
    stored = queries.shape[2] + (0 if kv_cache.values is None else kv_cache.value_size)
    # Rows of the pool, of the step, and twice both; products, scores and their weights, and scores
    # beside a sink.
    row = num_choices * 4 * stored * itemsize + 4 * num_heads * mx.float32.size
    return max(MAX_BYTES // (topk * row), 1)


def work(num_heads: int, size: int, value_size: int) -> int:
    """Returns the FLOPs of attention per token and chosen position."""
    return 2 * num_heads * (size + value_size)
