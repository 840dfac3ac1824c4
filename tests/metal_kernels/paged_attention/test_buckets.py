# SPDX-License-Identifier: Apache-2.0
"""Shared prefixes are gathered once and attended to by all requests."""

from dataclasses import replace
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from metal_kernels.paged_attention import AttentionShape, buckets, padded_rows, reference
from tests.metal_kernels.paged_attention.batches import bias_of, make_batch
from tests.metal_kernels.paged_attention.batches import expected as formula

SHAPE = AttentionShape(6, 2, 64, 64)
BLOCK = 16


def shared_batch(rng, families, cache_dtype=None):
    """
    Args:
        families: (blocks in common, requests as (tokens computed behind them, rows)) of each.
    """
    requests = [
        (BLOCK * blocks + own, rows) for blocks, members in families for own, rows in members
    ]
    batch = make_batch(rng, requests, SHAPE, mx.float32, cache_dtype)
    tables, contexts, first = batch.tables.copy(), list(batch.contexts), 0
    for blocks, members in families:
        for index in range(first, first + len(members)):
            tables[index, :blocks] = tables[first, :blocks]
            contexts[index] = tuple(
                np.concatenate([shared[: blocks * BLOCK], own[blocks * BLOCK :]])
                for shared, own in zip(contexts[first], contexts[index], strict=True)
            )
        first += len(members)
    return replace(batch, tables=tables, contexts=contexts)


def attend(batch, plan, **options):
    scales = batch.key_scales, batch.value_scales
    pools = batch.key_pool, batch.value_pool
    if scales[0] is None:
        pools = [mx.nan_to_num(pool) for pool in pools]
    else:
        pools = [mx.where(pool == 0x7F, 0, pool) for pool in pools]
        scales = [mx.nan_to_num(scale) for scale in scales]
    return reference.run(
        plan,
        batch.queries,
        None,
        None,
        *pools,
        0.2,
        key_scales=scales[0],
        value_scales=scales[1],
        **options,
    )


def plan_of(batch, slots=None, extent=None):
    slots = np.full(len(batch.queries), -1) if slots is None else slots
    placed = batch.starts, batch.seq_lens, batch.tables, slots, BLOCK
    return buckets.plan(*placed, share=True, extent=extent)


request = st.tuples(st.integers(0, 40), st.integers(1, 5))
family = st.tuples(st.integers(0, 6), st.lists(request, min_size=1, max_size=4))


@given(
    families=st.lists(family, min_size=1, max_size=3),
    with_sinks=st.booleans(),
    softcap=st.sampled_from([None, 3.0]),
    extent=st.sampled_from([None, 1, 30, 200]),
    in_pieces=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_batches_with_shared_prefixes_equal_the_formula(
    families, with_sinks, softcap, extent, in_pieces, seed
):
    rng = np.random.default_rng(seed)
    batch = shared_batch(rng, families)
    sinks = rng.normal(size=SHAPE.num_heads).astype(np.float32) if with_sinks else None
    bias = None if extent is None else bias_of(rng, batch, extent)
    limits = {"MAX_SCORES": 100, "MAX_GATHERED": 64, "MIN_ROWS": 3} if in_pieces else {}
    with mock.patch.multiple(buckets, MIN_SAVED=1, **limits):
        plan = plan_of(batch, extent=extent)
    given_sinks = None if sinks is None else mx.array(sinks)
    found = attend(batch, plan, sinks=given_sinks, softcap=softcap, bias=bias)
    wanted = formula(batch, 0.2, softcap=softcap, sinks=sinks, bias=bias)
    np.testing.assert_allclose(np.array(found), wanted, atol=1e-4)


@pytest.mark.parametrize("cache_dtype", [mx.uint8, None], ids=str)
def test_a_common_beginning_is_gathered_once(cache_dtype):
    families = [(32, [(20, 1)] * 6), (0, [(30, 1), (8, 4)])]
    batch = shared_batch(np.random.default_rng(0), families, cache_dtype)
    plan = plan_of(batch)
    (beginning,) = plan.shared
    assert (beginning.num_requests, beginning.context_len) == (1, 32 * BLOCK)
    assert beginning.rows.tolist() == list(range(6))
    assert sum(call.num_requests * call.context_len for call in plan.buckets) <= 6 * 32 + 32 + 16
    np.testing.assert_allclose(np.array(attend(batch, plan)), formula(batch, 0.2), atol=1e-4)


def test_a_beginning_that_another_request_writes_in_this_step_is_read_as_written():
    batch = shared_batch(np.random.default_rng(1), [(2, [(0, 3), (5, 1), (9, 2)])])
    before = 2 * BLOCK  # rows of the first request's prompt, which all come with this step as well
    starts = np.concatenate([[0], batch.starts[1:] + before]).astype(np.int32)
    slots, fresh = [], ([], [])
    for index, context in enumerate(batch.contexts):
        length = int(batch.seq_lens[index])
        for position in range(length - int(starts[index + 1] - starts[index]), length):
            slots.append(batch.tables[index, position // BLOCK] * BLOCK + position % BLOCK)
            for rows, part in zip(fresh, context, strict=True):
                rows.append(part[position].astype(np.float32))
    stale = []  # what the step writes is not in the pool yet
    for pool in (batch.key_pool, batch.value_pool):
        flat = mx.nan_to_num(pool).flatten(1, 2)
        flat[:, mx.array(np.array(slots))] = 7.0
        stale.append(flat.reshape(pool.shape))
    with mock.patch.multiple(buckets, MIN_SAVED=1):
        plan = buckets.plan(
            starts, batch.seq_lens, batch.tables, np.array(slots, np.int32), BLOCK, share=True
        )
    assert plan.shared[0].fresh.size == before
    queries = mx.concatenate([mx.zeros((before, *batch.queries.shape[1:])), batch.queries])
    keys, values = (mx.array(np.stack(rows)) for rows in fresh)
    found = reference.run(plan, queries, keys, values, *stale, 0.2)
    np.testing.assert_allclose(np.array(found)[before:], formula(batch, 0.2), atol=1e-4)


@pytest.mark.parametrize(
    ("family", "limits"),
    [
        ((2, [(5, 1)] * 3), {"MIN_SAVED": buckets.MIN_SAVED}),
        ((40, [(0, 300)] * 2), {"MAX_SCORES": 1000, "MIN_ROWS": 16}),
    ],
    ids=["short", "gathered anew for every few rows"],
)
def test_a_beginning_gets_no_call_of_its_own_where_it_saves_little(family, limits):
    batch = shared_batch(np.random.default_rng(2), [family])
    with mock.patch.multiple(buckets, **limits):
        plan = plan_of(batch)
    assert not plan.shared
    np.testing.assert_allclose(np.array(attend(batch, plan)), formula(batch, 0.2), atol=1e-4)


def test_short_requests_join_the_call_of_longer_ones_where_padding_costs_less():
    rng = np.random.default_rng(3)
    short = make_batch(rng, [(3, 1), (20, 1), (90, 1), (60, 1)], SHAPE, mx.float32)
    (call,) = plan_of(short).buckets
    assert (call.num_requests, call.context_len) == (4, 6 * BLOCK)
    np.testing.assert_allclose(
        np.array(attend(short, plan_of(short))), formula(short, 0.2), atol=1e-4
    )
    # Forty requests of a block each would have 5 more.
    many = make_batch(rng, [(90, 1)] + [(3, 1)] * 40, SHAPE, mx.float32)
    sizes = {(call.num_requests, call.context_len) for call in plan_of(many).buckets}
    assert sizes == {(1, 6 * BLOCK), (40, BLOCK)}
    np.testing.assert_allclose(np.array(attend(many, plan_of(many))), formula(many, 0.2), atol=1e-4)
    # Rows that prefill keep to calls of their own kind.
    assert len(plan_of(make_batch(rng, [(3, 1), (0, 64)], SHAPE, mx.float32)).buckets) == 2


@pytest.mark.parametrize("requests", [[(20, 5)], [(40, 3), (7, 5), (70, 1)]], ids=str)
def test_large_and_small_steps_find_the_same_writes(requests):
    batch = make_batch(np.random.default_rng(2), requests, SHAPE, mx.float32)
    slots = []
    for index, length in enumerate(batch.seq_lens.tolist()):
        count = int(batch.starts[index + 1] - batch.starts[index])
        at = np.arange(length - count, length)
        slots.append(batch.tables[index, at // BLOCK] * BLOCK + at % BLOCK)
    slots = np.concatenate(slots).astype(np.int32)
    slots[0] = -1  # never read
    found = []
    for few in (1 << 15, 0):
        with mock.patch.object(padded_rows, "FEW_PAIRS", few):
            plan = plan_of(batch, slots)
        for bucket in plan.buckets:
            sources = range(len(slots)) if bucket.sources is None else bucket.sources.tolist()
            found.append(sorted(set(zip(bucket.fresh.tolist(), sources, strict=True))))
    half = len(found) // 2
    assert found[:half] == found[half:]
    written = [row for writes in found[:half] for _, row in writes]
    assert sorted(written) == list(range(1, len(slots)))
