# SPDX-License-Identifier: Apache-2.0
"""Paged attention in MLX's operations: plan() once a step, run() once a layer.

It serves the CPU device and layers that the kernels do not, and the self-check compares the kernels
with it on the user's machine. One indexed read gathers a bucket's context from the pool, this
step's K/V are laid over it, and one batched attention call serves all of the bucket's rows. Python
work per layer is O(buckets), never O(requests).

A beginning that requests have in common is gathered once, and one matrix product serves the rows of
all. Each row's two results are then joined by the sums of their softmaxes.
"""

import math

import mlx.core as mx

from metal_kernels.kv_gather.reference import decode
from metal_kernels.pace import Pace
from metal_kernels.paged_attention.buckets import (
    MAX_GATHERED,
    MAX_SCORES,
    MIN_ROWS,
    Bucket,
    BucketPlan,
    plan,
)

__all__ = ["MAX_GATHERED", "MAX_SCORES", "MIN_ROWS", "Bucket", "BucketPlan", "plan", "run"]

_LOG2_E = math.log2(math.e)


def run(
    plan: BucketPlan,
    queries: mx.array,
    keys: mx.array | None,
    values: mx.array | None,
    key_pool: mx.array,
    value_pool: mx.array,
    scale: float,
    sinks: mx.array | None = None,
    softcap: float | None = None,
    fused: bool | None = None,
    key_scales: mx.array | None = None,
    value_scales: mx.array | None = None,
    pace: Pace | None = None,
) -> mx.array:
    """Attention of one layer.

    Args:
        plan: of this step, for this layer's block table and window.
        queries: [T, H, D].
        keys: [T, Hkv, D], of this step; None: the pool holds them already.
        values: [T, Hkv, DV], likewise.
        key_pool: [Hkv, B, block_size, D], of the dtype of `queries`, uint8 (fp8 e4m3) or int8.
        value_pool: [Hkv, B, block_size, DV], likewise.
        scale: factor on the scores.
        sinks: [H], a learned logit per head that takes part in the softmax only.
        softcap: scores become softcap * tanh(score / softcap).
        fused: whether by MLX's fused attention, which has no soft cap, or by plain operations;
            None: whichever is faster on this device.
        key_scales: [Hkv, B, block_size] bfloat16, of a pool of codes.
        value_scales: likewise.
        pace: ends command buffers between calls that take long; None: MLX alone ends them.

    Returns:
        [T, H, DV], the dtype of `queries`.
    """
    if fused is None:
        fused = mx.default_device().type == mx.DeviceType.gpu
    num_heads, sizes = queries.shape[1], queries.shape[2] + value_pool.shape[3]
    outputs: list[mx.array] = []
    log_sums: list[mx.array] = []
    for bucket in plan.calls:
        if pace is not None:
            pace.before(bucket.work(num_heads, sizes), *outputs[::-1])
        picked = queries if bucket.rows is None else queries[bucket.rows]
        picked = picked.reshape(bucket.num_requests, bucket.query_len, *queries.shape[1:])
        k = _context(bucket, keys, key_pool, key_scales, queries.dtype)
        v = _context(bucket, values, value_pool, value_scales, queries.dtype)
        if fused and softcap is None and not plan.shared:
            out = _attend_fused(picked, k, v, bucket.mask, scale, sinks)
        else:
            sinks_here = sinks if len(outputs) < len(plan.buckets) else None  # they count once
            out, log_sum = _attend_grouped(picked, k, v, bucket.mask, scale, sinks_here, softcap)
            log_sums.append(log_sum)
        outputs.append(out.reshape(-1, *out.shape[2:]))
    count = len(plan.buckets)
    merged = _in_order(outputs[:count], plan.order)
    if plan.shared:
        log_sum = _in_order(log_sums[:count], plan.order)
        more, more_sums = outputs[count:], log_sums[count:]
        if plan.shared_order is not None:  # a row of nothing, for those that share nothing
            more.append(mx.zeros_like(merged[:1]))
            more_sums.append(mx.full_like(log_sum[:1], -mx.inf))
        lead = _in_order(more_sums, plan.shared_order) - log_sum
        share = mx.sigmoid(lead * math.log(2.0))  # of the softmax's whole sum
        merged = merged + (_in_order(more, plan.shared_order) - merged) * share
    return merged.astype(queries.dtype)


def _in_order(parts: list[mx.array], order: mx.array | None) -> mx.array:
    merged = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return merged if order is None else merged[order]


def _context(
    bucket: Bucket,
    fresh: mx.array | None,
    pool: mx.array,
    scales: mx.array | None,
    dtype: mx.Dtype,
) -> mx.array:
    """The bucket's padded K or V, [Hkv, n, S, D], with this step's rows laid over the pool's.

    Head outermost, so that what is gathered is already laid out for the matrix products.
    """
    num_heads, num_blocks, block_size, head_size = pool.shape
    blocks, fresh_places = bucket.places(num_heads, num_blocks)
    context = pool.reshape(num_heads * num_blocks, block_size * head_size)[blocks]
    size = bucket.num_requests * bucket.context_len
    context = context.reshape(num_heads * size, head_size)
    if scales is not None:
        factors = scales.reshape(num_heads * num_blocks, block_size)[blocks]
        context = decode(context, factors.reshape(num_heads * size)).astype(dtype)
    if fresh is not None and bucket.fresh.size:
        rows = fresh if bucket.sources is None else fresh[bucket.sources]
        context[fresh_places] = rows.swapaxes(0, 1)
    return context.reshape(num_heads, bucket.num_requests, bucket.context_len, head_size)


def _attend_fused(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | None,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """[n, Q, H, D] queries over [Hkv, n, S, D] keys and values; same shape back."""
    out = mx.fast.scaled_dot_product_attention(
        queries.swapaxes(1, 2),
        keys.swapaxes(0, 1),
        values.swapaxes(0, 1),
        scale=scale,
        mask=mask,
        sinks=sinks,
    )
    return out.swapaxes(1, 2)


def _attend_grouped(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    mask: mx.array | None,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
) -> tuple[mx.array, mx.array]:
    """_attend_fused by plain operations: all query heads of a K/V head in one matrix product.

    On MLX's CPU backend four to eight times faster than the fused call: that one repeats K and V
    for every query head, and takes exp at 19 ns an element where a power of two takes 6.

    Returns:
        The same in float32, and [n * Q, H, 1] float32: log2 of each softmax's sum.
    """
    (n, q, num_heads, d), num_kv_heads = queries.shape, keys.shape[0]
    group = num_heads // num_kv_heads
    factor = scale * _LOG2_E if softcap is None else scale / softcap
    scaled = queries.astype(mx.float32) * factor
    packed = scaled.reshape(n, q, num_kv_heads, group, d).transpose(2, 0, 3, 1, 4)
    scores = packed.reshape(num_kv_heads, n, group * q, d) @ keys.swapaxes(-1, -2)
    scores = scores.reshape(num_kv_heads, n, group, q, -1)
    if softcap is not None:
        scores = mx.tanh(scores) * (softcap * _LOG2_E)
    if mask is not None:
        scores = mx.where(mask, scores, -mx.inf)
    top = scores.max(axis=-1, keepdims=True)
    rest = None
    if sinks is not None:
        rest = sinks.astype(mx.float32).reshape(num_kv_heads, 1, group, 1, 1) * _LOG2_E
        top = mx.maximum(top, rest)
    weights = mx.power(2.0, scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if rest is not None:
        total = total + mx.power(2.0, rest - top)
    out = weights.reshape(num_kv_heads, n, group * q, -1) @ values
    out = out.reshape(num_kv_heads, n, group, q, -1) / total
    log_sum = top + mx.log2(total)
    rows_first = out.transpose(1, 3, 0, 2, 4).reshape(n, q, num_heads, -1)
    return rows_first, log_sum.transpose(1, 3, 0, 2, 4).reshape(n * q, num_heads, 1)
