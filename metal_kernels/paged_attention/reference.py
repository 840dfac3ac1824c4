# SPDX-License-Identifier: Apache-2.0
"""Paged attention in MLX's operations, once per layer, by a plan of buckets.py.

It serves the CPU and layers that the kernels do not support, and is the reference for the
self-check. Python work per layer is O(buckets), not O(requests).
"""

import math
from collections.abc import Callable

import mlx.core as mx

from metal_kernels.kv_gather.reference import decode
from metal_kernels.pace import Pace
from metal_kernels.paged_attention.buckets import Bucket, BucketPlan

# For each bucket, one indexed read gathers its context from the pool, this step's K/V overwrite
# parts of it, and one batched call attends. A shared prefix is gathered once, and one matrix
# product serves all its rows; each row's two results are then joined by their softmax sums.

_LOG2_E = math.log2(math.e)

#: Takes a pool, a bucket and a quantized pool's scales; returns the decoded rows of the bucket's
#: blocks, [Hkv, n, S, D].
Gather = Callable[[mx.array, Bucket, mx.array | None], mx.array]


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
    gather: Gather | None = None,
    bias: mx.array | None = None,
) -> mx.array:
    """Attends for one layer.

    Args:
        plan: a plan for this layer's block table and window.
        queries: [T, H, D].
        keys: [E + T, Hkv, D], of the plan's earlier rows, if any, and of this step; None: they are
            in the pool.
        values: [E + T, Hkv, DV], like `keys`.
        key_pool: [Hkv, B, block_size, D], the dtype of `queries`, uint8 (fp8 e4m3) or int8.
        value_pool: [Hkv, B, block_size, DV], the dtype of `key_pool`; `key_pool` for latents.
        fused: use MLX's fused attention, which has no soft cap, instead of plain operations; None:
            the faster one on this device.
        scale, sinks, softcap, key_scales, value_scales, pace: see `op.run`.
        bias: [T, H, extent], added to the score of the key at distance d before the query's own
            position, for d < extent, the plan's.
        gather: reads contexts that already include this step's K/V; None: an indexed read.

    Returns:
        [T, H, DV], the dtype of `queries`.
    """
    fused = mx.default_device().type == mx.DeviceType.gpu if fused is None else fused
    num_heads, sizes = queries.shape[1], queries.shape[2] + value_pool.shape[3]
    outputs: list[mx.array] = []
    log_sums: list[mx.array] = []
    for bucket in plan.calls:
        if pace is not None:
            pace.before(bucket.work(num_heads, sizes), *outputs[::-1])
        picked = queries if bucket.rows is None else queries[bucket.rows]
        k = context(bucket, keys, key_pool, key_scales, queries.dtype, gather)
        v = k  # latents, of which the caller takes the values
        if value_pool is not key_pool:
            v = context(bucket, values, value_pool, value_scales, queries.dtype, gather)
        if fused and softcap is None and bias is None and not plan.shared:
            out = _attend_fused(picked, k, v, bucket, scale, sinks)
        else:
            sinks_here = sinks if len(outputs) < len(plan.buckets) else None  # count them only once
            biases = None if bias is None else _biases(bucket, bias)
            out, log_sum = _attend_grouped(picked, k, v, bucket, scale, sinks_here, softcap, biases)
            log_sums.append(log_sum)
        outputs.append(out)
    merged = _join_shared(plan, outputs, log_sums) if plan.shared else _reorder(outputs, plan.order)
    return merged.astype(queries.dtype)


def _join_shared(plan: BucketPlan, outputs: list[mx.array], log_sums: list[mx.array]) -> mx.array:
    """Merges each row's results over its own context and its prefix, [T, H, DV] float32."""
    count = len(plan.buckets)
    own = _reorder(outputs[:count], plan.order)
    log_sum = _reorder(log_sums[:count], plan.order)
    more, more_sums = outputs[count:], log_sums[count:]
    if plan.shared_order is not None:  # an empty row, for rows without a shared prefix
        more.append(mx.zeros_like(own[:1]))
        more_sums.append(mx.full_like(log_sum[:1], -mx.inf))
    lead = _reorder(more_sums, plan.shared_order) - log_sum
    share = mx.sigmoid(lead * math.log(2.0))  # of the softmax sum
    return own + (_reorder(more, plan.shared_order) - own) * share


def _reorder(parts: list[mx.array], order: mx.array | None) -> mx.array:
    merged = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return merged if order is None else merged[order]


def context(
    bucket: Bucket,
    fresh: mx.array | None,
    pool: mx.array,
    scales: mx.array | None,
    dtype: mx.Dtype,
    gather: Gather | None = None,
) -> mx.array:
    """Returns the bucket's padded K or V, [Hkv, n, S, D], with this step's rows over the pool's."""
    # Heads are outermost, which is the layout of the matrix products.
    if gather is not None:
        return gather(pool, bucket, scales)
    blocks, indices = bucket.indices(pool.shape[0])
    shape = pool.shape[0], bucket.num_requests, bucket.context_len
    found = pool[blocks].reshape(*shape, -1)
    if scales is not None:
        found = decode(found, scales[blocks].reshape(shape)).astype(dtype)
    if fresh is not None and bucket.fresh.size:
        rows = fresh if bucket.sources is None else fresh[bucket.sources]
        found[indices] = rows.flatten(0, 1)
    return found


def _attend_fused(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    bucket: Bucket,
    scale: float,
    sinks: mx.array | None,
) -> mx.array:
    """Attends for [n * Q, H, D] queries over [Hkv, n, S, D] keys and values."""
    mask: mx.array | str | None = bucket.mask
    if bucket.causal_len is not None:
        keys, values = (part[:, :, : bucket.causal_len] for part in (keys, values))
        mask = "causal"
    out = mx.fast.scaled_dot_product_attention(
        queries.reshape(bucket.num_requests, bucket.query_len, *queries.shape[1:]).swapaxes(1, 2),
        keys.swapaxes(0, 1),
        values.swapaxes(0, 1),
        scale=scale,
        mask=mask,
        sinks=sinks,
    )
    return out.swapaxes(1, 2).flatten(0, 1)


def _attend_grouped(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    bucket: Bucket,
    scale: float,
    sinks: mx.array | None,
    softcap: float | None,
    biases: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """Like `_attend_fused`, in plain operations. `biases`: [n * Q, H, S] float32.

    Returns:
        The result in float32, and [n * Q, H, 1] float32: log2 of each softmax sum.
    """
    # All query heads of a K/V head share one matrix product. On MLX's CPU backend this is four to
    # eight times as fast as the fused call, which repeats K and V for every query head, and takes
    # exp at 19 ns per element, while a power of two takes 6.
    num_heads, num_kv_heads = queries.shape[1], keys.shape[0]
    group = num_heads // num_kv_heads
    # A single row needs no axis, which saves view operations.
    queries_axis = () if bucket.query_len == 1 else (bucket.query_len,)
    factor = scale * _LOG2_E if softcap is None else scale / softcap
    packed = _heads_first(queries.astype(mx.float32) * factor, bucket, num_kv_heads)
    scores = packed @ keys.swapaxes(-1, -2)
    rows = (*scores.shape[:2], *queries_axis, group)
    scores = scores.reshape(*rows, -1)
    if softcap is not None:
        scores = mx.tanh(scores) * (softcap * _LOG2_E)
    if biases is not None:
        by_head = _heads_first(biases * _LOG2_E, bucket, num_kv_heads)
        scores = scores + by_head.reshape(scores.shape)
    if bucket.mask is not None:
        mask = bucket.mask.reshape(bucket.num_requests, *queries_axis, 1, -1)
        scores = mx.where(mask, scores, -mx.inf)
    top = scores.max(axis=-1, keepdims=True)
    rest = None
    if sinks is not None:
        one_each = (1,) * (1 + len(queries_axis))
        rest = sinks.astype(mx.float32).reshape(num_kv_heads, *one_each, group, 1) * _LOG2_E
        top = mx.maximum(top, rest)
    weights = mx.power(2.0, scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if rest is not None:
        total = total + mx.power(2.0, rest - top)
    out = weights.reshape(*packed.shape[:3], -1) @ values
    out = out.reshape(*rows, -1) / total
    return (
        _rows_first(out, bucket, num_heads),
        _rows_first(top + mx.log2(total), bucket, num_heads),
    )


def _biases(bucket: Bucket, bias: mx.array) -> mx.array:
    """Returns the biases of a bucket's scores, [n * Q, H, S] float32."""
    assert bucket.distances is not None
    extent = bias.shape[-1]
    rows = bias if bucket.rows is None else bias[bucket.rows]
    distances = bucket.distances.reshape(-1, 1, bucket.context_len)
    found = mx.take_along_axis(rows, mx.minimum(distances, extent - 1), axis=-1)
    return mx.where(distances < extent, found.astype(mx.float32), 0.0)


def _heads_first(rows: mx.array, bucket: Bucket, num_kv_heads: int) -> mx.array:
    """Reshapes [n * Q, H, D] to [Hkv, n, Q * group, D]."""
    n, q, size = bucket.num_requests, bucket.query_len, rows.shape[-1]
    if q == 1:
        return rows.reshape(n, num_kv_heads, -1, size).swapaxes(0, 1)
    heads_first = rows.reshape(n, q, num_kv_heads, -1, size).transpose(2, 0, 1, 3, 4)
    return heads_first.reshape(num_kv_heads, n, -1, size)


def _rows_first(heads_first: mx.array, bucket: Bucket, num_heads: int) -> mx.array:
    """Reshapes [Hkv, n, group, D] if Q is 1, else [Hkv, n, Q, group, D], to [n * Q, H, D]."""
    axes = (1, 0, 2, 3) if bucket.query_len == 1 else (1, 2, 0, 3, 4)
    rows_first = heads_first.transpose(axes)
    return rows_first.reshape(-1, num_heads, heads_first.shape[-1])
