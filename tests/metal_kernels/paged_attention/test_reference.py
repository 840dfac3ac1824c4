# SPDX-License-Identifier: Apache-2.0
"""Paged attention against a float64 formula, one row at a time."""

import contextlib
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_kernels.pace import Pace
from metal_kernels.paged_attention import AttentionShape, buckets, reference
from tests.metal_kernels.paged_attention.batches import expected as formula
from tests.metal_kernels.paged_attention.batches import make_batch

KV_HEADS, HEAD_SIZE = 2, 8


def naive(queries, keys, values, positions, scale, window, sinks):
    """Returns [T, H, D]; keys and values are each row's own context, in order."""
    out = np.empty_like(queries, dtype=np.float64)
    group = queries.shape[1] // KV_HEADS
    for row, position in enumerate(positions):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(queries.shape[1]):
            k = keys[row][first : position + 1, head // group].astype(np.float64)
            v = values[row][first : position + 1, head // group].astype(np.float64)
            scores = k @ queries[row, head].astype(np.float64) * scale
            top = max(scores.max(), -np.inf if sinks is None else sinks[head])
            weights = np.exp(scores - top)
            rest = 0.0 if sinks is None else np.exp(sinks[head] - top)
            out[row, head] = weights @ v / (weights.sum() + rest)
    return out


def head_first(pool):
    """Converts [B, block_size, Hkv, D] to the op's [Hkv, B, block_size, D]."""
    return mx.array(np.ascontiguousarray(pool.transpose(2, 0, 1, 3)))


def small_pieces():
    """Lowers limits so that small batches exceed them."""
    return mock.patch.multiple(buckets, MAX_SCORES=100, MAX_GATHERED=64, MIN_ROWS=3)


request = st.tuples(st.integers(0, 70), st.integers(1, 40))  # computed before, rows now


@given(
    requests=st.lists(request, min_size=1, max_size=6),
    block_size=st.sampled_from([16, 32]),
    heads=st.sampled_from([2, 4, 6]),
    window=st.sampled_from([None, 1, 5, 16, 24]),
    with_sinks=st.booleans(),
    fused=st.booleans(),
    in_pieces=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_ragged_batches_equal_the_formula(
    requests, block_size, heads, window, with_sinks, fused, in_pieces, seed
):
    rng = np.random.default_rng(seed)
    computed = np.array([before for before, _ in requests], np.int32)
    counts = np.array([rows for _, rows in requests], np.int32)
    seq_lens = computed + counts
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    num_blocks = int((-(-seq_lens // block_size)).sum()) + 1
    free = rng.permutation(np.arange(1, num_blocks)).astype(np.int32)
    tables = np.zeros((len(requests), int(-(-seq_lens.max() // block_size))), np.int32)
    key_pool = rng.normal(size=(num_blocks, block_size, KV_HEADS, HEAD_SIZE)).astype(np.float32)
    value_pool = rng.normal(size=key_pool.shape).astype(np.float32)
    contexts_k, contexts_v, positions, slots = [], [], [], []
    for index, (before, rows) in enumerate(requests):
        width = -(-int(seq_lens[index]) // block_size)
        tables[index, :width], free = free[:width], free[width:]
        context = rng.normal(size=(2, int(seq_lens[index]), KV_HEADS, HEAD_SIZE))
        context = context.astype(np.float32)
        for position in range(int(seq_lens[index])):
            block, offset = tables[index, position // block_size], position % block_size
            if position < before:  # the rest comes with this step
                key_pool[block, offset], value_pool[block, offset] = context[:, position]
            else:
                slots.append(block * block_size + offset)
                positions.append(position)
        contexts_k += [context[0]] * rows
        contexts_v += [context[1]] * rows
    queries = rng.normal(size=(len(positions), heads, HEAD_SIZE)).astype(np.float32)
    keys = np.stack([c[p] for c, p in zip(contexts_k, positions, strict=True)])
    values = np.stack([c[p] for c, p in zip(contexts_v, positions, strict=True)])
    sinks = rng.normal(size=heads).astype(np.float32) if with_sinks else None

    with small_pieces() if in_pieces else contextlib.nullcontext():
        plan = buckets.plan(starts, seq_lens, tables, np.array(slots, np.int32), block_size, window)
    found = reference.run(
        plan,
        *(mx.array(a) for a in (queries, keys, values)),
        *(head_first(pool) for pool in (key_pool, value_pool)),
        fused=fused,
        scale=0.3,
        sinks=None if sinks is None else mx.array(sinks),
    )
    expected = naive(queries, contexts_k, contexts_v, positions, 0.3, window, sinks)
    np.testing.assert_allclose(np.array(found), expected, atol=2e-5)


def test_a_request_reads_blocks_another_writes_in_the_same_step():
    rng = np.random.default_rng(1)
    context = rng.normal(size=(40, KV_HEADS, HEAD_SIZE)).astype(np.float32)
    own = rng.normal(size=(3, KV_HEADS, HEAD_SIZE)).astype(np.float32)
    # Request 0 writes positions 0..39 in blocks 3, 1, 2; request 1 shares the first two blocks.
    tables = np.array([[3, 1, 2], [3, 1, 4]], np.int32)
    starts, seq_lens = np.array([0, 40, 43], np.int32), np.array([40, 35], np.int32)
    slots = [table * 16 + o for table in (3, 1) for o in range(16)]
    slots += [2 * 16 + o for o in range(8)] + [4 * 16 + o for o in range(3)]
    rows = np.concatenate([context, own])
    queries = rng.normal(size=(43, 2, HEAD_SIZE)).astype(np.float32)
    stale = head_first(rng.normal(size=(5, 16, KV_HEADS, HEAD_SIZE)).astype(np.float32))
    plan = buckets.plan(starts, seq_lens, tables, np.array(slots, np.int32), 16)
    found = reference.run(
        plan, mx.array(queries), mx.array(rows), mx.array(rows), stale, stale, 0.5
    )
    second = np.concatenate([context[:32], own])
    contexts = [context] * 40 + [second] * 3
    expected = naive(
        queries, contexts, contexts, [*range(40), 32, 33, 34], 0.5, window=None, sinks=None
    )
    np.testing.assert_allclose(np.array(found), expected, atol=2e-5)


def test_decode_rows_share_few_buckets_whatever_their_number():
    seq_lens = np.arange(1, 65, dtype=np.int32) * 9
    starts = np.arange(65, dtype=np.int32)
    tables = np.arange(64 * 36, dtype=np.int32).reshape(64, 36)
    slots = tables[np.arange(64), (seq_lens - 1) // 16] * 16 + (seq_lens - 1) % 16
    plan = buckets.plan(starts, seq_lens, tables, slots, 16)
    assert len(plan.buckets) <= 7  # one a power of two from 1 to 36 blocks
    assert sum(bucket.num_requests for bucket in plan.buckets) == 64


def test_no_call_holds_more_than_the_limits_however_long_the_contexts():
    # A chunk of a long prompt, the rest of a short one, and decode rows of one shared context.
    seq_lens = np.array([100_000, 700, *[30_000] * 40], np.int32)
    starts = np.cumsum([0, 1000, 300, *[1] * 40]).astype(np.int32)
    tables = np.tile(np.arange(6250, dtype=np.int32), (42, 1))
    slots = np.arange(starts[-1], dtype=np.int32) + 6250 * 16
    for window, share in ((None, False), (None, True), (4096, False)):
        plan = buckets.plan(starts, seq_lens, tables, slots, 16, window, share)
        assert bool(plan.shared) == share
        for bucket in plan.calls:
            size = bucket.num_requests * bucket.context_len
            alone = bucket.num_requests == 1
            assert size <= buckets.MAX_GATHERED or alone
            assert size * bucket.query_len <= buckets.MAX_SCORES or (
                alone and bucket.query_len <= buckets.MIN_ROWS
            )
        rows = [row for bucket in plan.buckets for row in bucket.rows.tolist()]
        assert set(rows) == set(range(starts[-1]))


@pytest.mark.parametrize("cache_dtype", [mx.uint8, mx.int8], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_pools_of_codes_equal_the_formula(cache_dtype, fused):
    shape = AttentionShape(4, 2, 64, 64)
    requests = [(37, 1), (0, 20), (16, 5), (50, 1)]
    batch = make_batch(np.random.default_rng(3), requests, shape, mx.float32, cache_dtype)
    pools = [batch.key_pool, batch.value_pool]
    if cache_dtype == mx.uint8:  # without the NaN where no request has a token
        pools = [mx.where(pool == 0x7F, 0, pool) for pool in pools]
    nowhere = np.full(len(batch.queries), -1)
    plan = buckets.plan(batch.starts, batch.seq_lens, batch.tables, nowhere, 16, window=30)
    found = reference.run(
        plan,
        batch.queries,
        None,
        None,
        *pools,
        scale=0.2,
        fused=fused,
        key_scales=mx.nan_to_num(batch.key_scales),
        value_scales=mx.nan_to_num(batch.value_scales),
    )
    np.testing.assert_allclose(np.array(found), formula(batch, 0.2, window=30), atol=1e-4)


def test_work_between_the_ends_of_command_buffers_answers_the_same(monkeypatch):
    shape = AttentionShape(4, 2, 64, 64)
    batch = make_batch(np.random.default_rng(4), [(37, 1), (0, 20), (300, 5)], shape, mx.float32)
    nowhere, ends = np.full(len(batch.queries), -1), []
    plan = buckets.plan(batch.starts, batch.seq_lens, batch.tables, nowhere, 16)
    pools = [mx.nan_to_num(pool) for pool in (batch.key_pool, batch.value_pool)]
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: ends.append(mx.eval(*arrays)))
    found = reference.run(plan, batch.queries, None, None, *pools, 0.2, pace=Pace(most_work=1))
    np.testing.assert_allclose(np.array(found), formula(batch, 0.2), atol=1e-4)
    assert len(ends) == len(plan.buckets) - 1 == 2
