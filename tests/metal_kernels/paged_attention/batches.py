# SPDX-License-Identifier: Apache-2.0
"""Ragged batches over a paged pool, and the float64 formula of their attention."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import torch

from metal_kernels.layout import PositionLag
from metal_kernels.paged_attention import AttentionShape

NAN_BITS = {mx.uint8: 0x7F, mx.int8: 0}  # int8 has none, but its scales do


@dataclass(frozen=True)
class Batch:
    shape: AttentionShape
    starts: np.ndarray  # [R + 1]
    seq_lens: np.ndarray  # [R]
    tables: np.ndarray  # [R, W]
    queries: mx.array  # [T, H, D]
    key_pool: mx.array  # [Hkv, B, block_size, D], NaN outside of requests' tokens
    value_pool: mx.array
    key_scales: mx.array | None
    value_scales: mx.array | None
    contexts: list[tuple[np.ndarray, np.ndarray]]  # per request K [S, Hkv, D] and V, float64


def decoded(codes, scales):
    """Decodes a pool's array to float64."""
    if codes.dtype == mx.uint8:
        raw = torch.from_numpy(np.array(codes)).view(torch.float8_e4m3fn)
        values = raw.to(torch.float64).numpy()
    else:
        values = np.array(codes.astype(mx.float32), np.float64)
    return (
        values
        if scales is None
        else values * np.array(scales.astype(mx.float32), np.float64)[..., None]
    )


def make_batch(rng, requests, shape, dtype, cache_dtype=None, block_size=16, alike=()):
    """
    Args:
        requests: (tokens computed before, rows of this step) of each.
        cache_dtype: dtype of the pool; None: the queries' dtype.
        alike: (indices of requests, number of shared leading blocks) of each group.
    """
    counts = np.array([rows for _, rows in requests], np.int32)
    seq_lens = counts + np.array([before for before, _ in requests], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    widths = -(-seq_lens // block_size)
    num_blocks = int(widths.sum()) + 2
    free = rng.permutation(np.arange(num_blocks)).astype(np.int32)
    tables = np.full((len(requests), int(widths.max())), num_blocks - 1, np.int32)
    for index, width in enumerate(widths):
        tables[index, :width], free = free[:width], free[width:]
    for members, count in alike:
        tables[list(members), :count] = tables[members[0], :count]
    pool_shape = (shape.num_kv_heads, num_blocks, block_size, shape.head_size)
    value_shape = (*pool_shape[:3], shape.value_size)
    key_pool, key_scales = _pool(rng, pool_shape, cache_dtype or dtype, tables, seq_lens)
    value_pool, value_scales = key_pool, key_scales
    if not shape.latent:
        value_pool, value_scales = _pool(rng, value_shape, cache_dtype or dtype, tables, seq_lens)
    queries = rng.normal(size=(int(starts[-1]), shape.num_heads, shape.head_size))
    keys, values = decoded(key_pool, key_scales), decoded(value_pool, value_scales)
    contexts = []
    for table, length in zip(tables, seq_lens, strict=True):
        positions = np.arange(length)
        at = table[positions // block_size], positions % block_size
        contexts.append((keys[:, *at].swapaxes(0, 1), values[:, *at].swapaxes(0, 1)))
    return Batch(
        shape,
        starts,
        seq_lens,
        tables,
        mx.array(queries.astype(np.float32)).astype(dtype),
        key_pool,
        value_pool,
        key_scales,
        value_scales,
        contexts,
    )


def _pool(rng, shape, dtype, tables, seq_lens):
    _, num_blocks, block_size, _ = shape
    used = np.zeros((num_blocks, block_size), bool)
    for table, length in zip(tables, seq_lens, strict=True):
        positions = np.arange(length)
        used[table[positions // block_size], positions % block_size] = True
    if dtype in (mx.uint8, mx.int8):
        codes = rng.integers(0, 256, shape).astype(np.uint8)
        if dtype == mx.uint8:
            codes[(codes & 0x7F) == 0x7F] = 0  # NaN
        codes[:, ~used] = NAN_BITS[dtype]
        scales = rng.uniform(0.5, 1.5, shape[:3]).astype(np.float32) / 100.0
        scales[:, ~used] = np.nan
        codes = codes if dtype == mx.uint8 else codes.view(np.int8)
        return mx.array(codes), mx.array(scales).astype(mx.bfloat16)
    values = rng.normal(size=shape).astype(np.float32)
    values[:, ~used] = np.nan
    return mx.array(values).astype(dtype), None


def overstated(batch: Batch, most: int) -> tuple[np.ndarray, np.ndarray, PositionLag]:
    """Returns lengths [R] up to `most` too large, tables [R, W] for them, and the lag.

    Slots past the true lengths hold NaN, as another request may have left there.
    """
    num_requests = len(batch.seq_lens)
    counts = (most - np.arange(num_requests) % (most + 1)).astype(np.int32)
    seq_lens = batch.seq_lens + counts
    _, num_blocks, block_size, _ = batch.key_pool.shape
    missing = max(0, -(-int(seq_lens.max()) // block_size) - batch.tables.shape[1])
    tables = np.pad(batch.tables, ((0, 0), (0, missing)), constant_values=num_blocks - 1)
    return seq_lens, tables, PositionLag(mx.array(counts), np.full(num_requests, most, np.int32))


def bias_of(rng, batch, extent):
    """Draws biases large enough to reorder keys, [T, H, extent] in the queries' dtype."""
    bias = 2.0 * rng.normal(size=(*batch.queries.shape[:2], extent))
    return mx.array(bias.astype(np.float32)).astype(batch.queries.dtype)


def expected(batch, scale, window=None, softcap=None, sinks=None, bidirectional=False, bias=None):
    """Returns [T, H, DV] float64, one row and head at a time.

    Args:
        bias: [T, H, extent], added to the score of the key this many positions before the row's.
    """
    shape = batch.shape
    queries = np.array(batch.queries.astype(mx.float32), np.float64)
    out = np.empty((len(queries), shape.num_heads, shape.value_size))
    for request, (keys, values) in enumerate(batch.contexts):
        rows = range(batch.starts[request], batch.starts[request + 1])
        for row, position in zip(reversed(rows), range(len(keys) - 1, -1, -1), strict=False):
            first = 0 if window is None else max(0, position - window + 1)
            past = len(keys) if bidirectional else position + 1
            k = keys[first:past].repeat(shape.group, axis=1)
            v = values[first:past, :, : shape.value_size].repeat(shape.group, axis=1)
            scores = np.einsum("hd,shd->hs", queries[row], k) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            if bias is not None:
                near = min(bias.shape[-1], position + 1 - first)  # keys with a bias, the last ones
                added = np.array(bias[row, :, :near].astype(mx.float32), np.float64)
                scores[:, scores.shape[1] - near :] += added[:, ::-1]
            top = scores.max(axis=1)
            if sinks is not None:
                top = np.maximum(top, sinks)
            weights = np.exp(scores - top[:, None])
            total = weights.sum(axis=1)
            if sinks is not None:
                total = total + np.exp(sinks - top)
            out[row] = np.einsum("hs,shd->hd", weights, v) / total[:, None]
    return out
