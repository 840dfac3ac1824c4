# SPDX-License-Identifier: Apache-2.0
"""The attention kernels, interpreted and checked, against a float64 formula and the reference."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metal_interpreter import Checker, metal_kernel
from pairs import pairwise

from metal_kernels import kernel, kv_write, paged_attention
from metal_kernels.paged_attention import AttentionShape, Splits, buckets, reference
from metal_kernels.paged_attention.op import HEAD_SIZES, LATENT_SIZES, SIZES_APART
from metal_kernels.paged_attention.splits import DEFAULT
from tests.metal_kernels.paged_attention.batches import (
    Batch,
    bias_of,
    expected,
    make_batch,
    overstated,
)

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
CACHES = {"same": None, "fp8": mx.uint8, "int8": mx.int8}
FENCE = mx.zeros(8, mx.uint32)
SCALE = 0.09
MORE = pytest.mark.more


def attend(
    batch,
    window=None,
    softcap=None,
    sinks=None,
    most_behind=0,
    splits=DEFAULT,
    bidirectional=False,
    bias=None,
):
    seq_lens, tables, lag = batch.seq_lens, batch.tables, None
    if most_behind:
        seq_lens, tables, lag = overstated(batch, most_behind)
    plan = paged_attention.plan(
        *(batch.starts, seq_lens, tables, batch.shape, window),
        lag=lag,
        splits=splits,
        block_size=batch.key_pool.shape[2] if bidirectional else None,
        bidirectional=bidirectional,
        extent=None if bias is None else bias.shape[-1],
    )
    out, fences = paged_attention.run(
        plan,
        batch.queries,
        batch.key_pool,
        batch.value_pool,
        FENCE,
        SCALE,
        softcap=softcap,
        sinks=sinks,
        key_scales=batch.key_scales,
        value_scales=batch.value_scales,
        bias=bias,
    )
    assert all(np.array(fence).tolist() == [0] * 8 for fence in fences)
    return out


def check(
    batch,
    compiler,
    window=None,
    softcap=None,
    sinks=None,
    most_behind=0,
    bidirectional=False,
    bias=None,
):
    options = {"bidirectional": bidirectional, "bias": bias}
    with kernel.using(compiler):
        out = attend(batch, window, softcap, sinks, most_behind, **options)
    assert out.dtype == batch.queries.dtype
    found = np.array(out.astype(mx.float32))
    sinks = None if sinks is None else np.array(sinks.astype(mx.float32), np.float64)
    wanted = expected(batch, SCALE, window, softcap, sinks, bidirectional, bias)
    # An output is an average of values: each, and the output, rounded to the dtype once at most.
    largest = max(np.abs(values).max() for _, values in batch.contexts)
    atol = float(mx.finfo(out.dtype).eps) * largest + 1e-5  # and float32's sums
    np.testing.assert_allclose(found, wanted, atol=atol, rtol=0)


# Decode rows; drafts to verify; a prompt among them: (computed, rows) of each.
STEPS = {
    "decode": [(0, 1), (37, 1), (15, 1), (16, 1)],
    "verify": [(21, 12), (0, 9), (4, 2)],
    "prefill": [(21, 33), (0, 9), (4, 2)],
}
LONG = 600  # of context: enough to be split
# Block size, query heads a K/V head, window, soft cap, sinks, order of threads.
FEATURES = {
    "long": (32, 1, None, 5.0, True, "random:2"),  # one request has LONG before it
    "capped": (16, 8, 20, 5.0, False, "random:1"),
    "plain": (32, 3, 7, None, True, "reverse"),
}
SIZES = [*((size, size) for size in HEAD_SIZES), *SIZES_APART, *LATENT_SIZES]


@pairwise(
    sizes=SIZES, dtype=list(DTYPES), cache=list(CACHES), kind=list(STEPS), feature=list(FEATURES)
)
def test_every_combination(sizes, dtype, cache, kind, feature):
    rng, steps = np.random.default_rng(sizes[0]), STEPS[kind]
    block_size, group, window, softcap, with_sinks, schedule = FEATURES[feature]
    shape = AttentionShape(2 * group, 2, *sizes)
    if sizes in LATENT_SIZES:
        shape = AttentionShape(5 * group, 1, *sizes)
    if feature == "long":
        steps = [(LONG, min(steps[0][1], 20)), steps[1]]
    batch = make_batch(rng, steps, shape, DTYPES[dtype], CACHES[cache], block_size)
    sinks = mx.array(rng.normal(size=shape.num_heads)).astype(DTYPES[dtype]) if with_sinks else None
    checker = Checker(schedule)
    check(batch, checker.metal_kernel, window, softcap, sinks)
    assert (checker.dispatches[-1].kernel == "reduce") == (feature == "long")


request = st.tuples(st.integers(0, 700), st.integers(1, 4) | st.integers(1, 40))


@settings(max_examples=14)
@given(
    requests=st.lists(request, min_size=1, max_size=5),
    block_size=st.sampled_from([16, 32]),
    heads=st.sampled_from([(1, 1), (2, 1), (9, 3), (7, 7), (8, 1)]),
    window=st.sampled_from([None, 1, 5, 64]),
    softcap=st.sampled_from([None, 3.0]),
    with_sinks=st.booleans(),
    schedule=st.sampled_from(["forward", "reverse"]) | st.integers(0, 99).map("random:{}".format),
    seed=st.integers(0, 2**16),
)
def test_ragged_batches(requests, block_size, heads, window, softcap, with_sinks, schedule, seed):
    rng = np.random.default_rng(seed)
    shape = AttentionShape(*heads, 64, 64)
    batch = make_batch(rng, requests, shape, mx.float16, None, block_size)
    sinks = mx.array(rng.normal(size=heads[0]).astype(np.float32)) if with_sinks else None
    check(batch, Checker(schedule).metal_kernel, window, softcap, sinks)


@settings(max_examples=12)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 40) | st.integers(480, 530), st.integers(1, 9)),
        min_size=1,
        max_size=4,
    ),
    most=st.integers(1, 8),
    block_size=st.sampled_from([16, 32]),
    heads=st.sampled_from([(1, 1), (2, 1), (9, 3)]),
    window=st.sampled_from([None, 1, 5, 64]),
    seed=st.integers(0, 2**16),
)
def test_requests_that_end_before_where_the_host_says(
    requests, most, block_size, heads, window, seed
):
    rng = np.random.default_rng(seed)
    batch = make_batch(rng, requests, AttentionShape(*heads, 64, 64), mx.float16, None, block_size)
    check(batch, Checker("forward").metal_kernel, window, most_behind=most)


#: Query heads a K/V head, head size, dtype, cache, window, extent, (computed, rows), rows behind.
BIASED = {
    "decode": (2, 64, "f32", "same", None, 16, [(37, 1), (3, 1), (16, 2)], 0),
    "behind": (4, 128, "f16", "same", None, 20, [(37, 3), (60, 2)], 2),
    "window": (1, 128, "bf16", "same", 24, 24, [(70, 3), (5, 9)], 0),
    "codes": (2, 128, "f16", "fp8", None, 7, [(30, 1), (21, 20)], 0),
    "in parts": (2, 64, "f32", "int8", None, 300, [(LONG, 2)], 3),
    "prompt": (2, 128, "f16", "same", None, 30, [(21, 40), (0, 9)], 0),
    "prompt's window": (2, 192, "f32", "same", 9, 5, [(21, 33), (4, 2)], 2),
    "one distance": (2, 64, "f32", "same", None, 1, [(20, 1), (20, 21)], 0),
}


@pytest.mark.parametrize("name", list(BIASED))
def test_scores_get_a_bias_by_distance(name):
    group, size, dtype, cache, window, extent, requests, most_behind = BIASED[name]
    rng = np.random.default_rng(4)
    shape = AttentionShape(2 * group, 2, size, size)
    batch = make_batch(rng, requests, shape, DTYPES[dtype], CACHES[cache], 16)
    bias = bias_of(rng, batch, extent)
    checker = Checker("random:3")
    check(batch, checker.metal_kernel, window, None, None, most_behind, bias=bias)
    if cache != "same" or dtype != "f32":
        return
    nowhere = np.full(batch.starts[-1], -1, np.int32)
    placed = batch.starts, batch.seq_lens, batch.tables, nowhere, 16, window
    plan = buckets.plan(*placed, extent=extent)
    pools = [mx.nan_to_num(pool) for pool in (batch.key_pool, batch.value_pool)]
    for fused in (False, True):
        given = batch.queries, None, None, *pools, SCALE
        out = reference.run(plan, *given, fused=fused, bias=bias)
        wanted = expected(batch, SCALE, window, bias=bias)
        np.testing.assert_allclose(np.array(out), wanted, atol=1e-5, rtol=0)


def test_a_bias_other_than_planned_is_rejected():
    batch = make_batch(np.random.default_rng(0), [(3, 2)], AttentionShape(2, 2, 64, 64), mx.float32)
    of_four = mx.zeros((2, 2, 4))
    planned = paged_attention.plan(
        batch.starts, batch.seq_lens, batch.tables, batch.shape, extent=4
    )
    placed = batch.queries, batch.key_pool, batch.value_pool, FENCE, SCALE
    for bias in (None, of_four[:, :, :3], of_four.astype(mx.float16)):
        with pytest.raises(ValueError, match="bias: expected"):
            paged_attention.run(planned, *placed, bias=bias)
    with pytest.raises(ValueError, match="soft cap"):
        paged_attention.run(planned, *placed, softcap=2.0, bias=of_four)
    without = replace(planned, extent=None)
    with pytest.raises(ValueError, match="bias: expected None"):
        paged_attention.run(without, *placed, bias=of_four)


#: Heads, head size, window, (computed, rows) of each request, most rows that it may be behind.
BLOCKS = {
    "decode": ((4, 2), 64, None, [(37, 5), (16, 5), (1, 5)], 4),
    "window": ((8, 2), 128, 9, [(37, 5), (3, 5)], 2),  # shorter than context and block
    "several tiles": ((16, 2), 128, None, [(40, 8), (17, 8)], 0),
    "prompts' kernel": ((8, 1), 256, 24, [(70, 16), (5, 16)], 3),
    "in parts": ((4, 1), 64, None, [(LONG, 8)], 5),
}


@pytest.mark.parametrize("name", list(BLOCKS))
def test_rows_of_a_bidirectional_block_see_each_other(name):
    heads, size, window, requests, most_behind = BLOCKS[name]
    shape = AttentionShape(*heads, size, size)
    batch = make_batch(np.random.default_rng(8), requests, shape, mx.float32, None, 16)
    options = {"most_behind": most_behind, "bidirectional": True}
    check(batch, Checker("reverse").metal_kernel, window, **options)
    nowhere = np.full(batch.starts[-1], -1, np.int32)
    placed = batch.starts, batch.seq_lens, batch.tables, nowhere, 16, window
    plan = buckets.plan(*placed, share=window is None, bidirectional=True)
    pools = [mx.nan_to_num(pool) for pool in (batch.key_pool, batch.value_pool)]
    for fused in (False, True):
        if not (fused and plan.shared):
            out = reference.run(plan, batch.queries, None, None, *pools, SCALE, fused=fused)
            wanted = expected(batch, SCALE, window, bidirectional=True)
            np.testing.assert_allclose(np.array(out), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("num_rows", [1, 20], ids=["decode", "prefill"])
def test_an_empty_part_of_a_context_counts_for_nothing(num_rows):
    """The context's last part starts where the request has ended."""
    shape = AttentionShape(2, 1, 64, 64)
    batch = make_batch(np.random.default_rng(1), [(512 - num_rows, num_rows)], shape, mx.float16)
    checker = Checker("forward")
    check(batch, checker.metal_kernel, most_behind=3)
    assert checker.dispatches[-1].kernel == "reduce"


def row_alone(batch, row):
    """Returns a batch of one request whose newest row is `row` of the first request."""
    count = int(batch.starts[1])
    contexts = [tuple(part[: len(part) - count + 1 + row] for part in batch.contexts[0])]
    return replace(
        batch,
        starts=np.array([0, 1], np.int32),
        seq_lens=batch.seq_lens[:1] - count + 1 + row,
        tables=batch.tables[:1],
        queries=batch.queries[row : row + 1],
        contexts=contexts,
    )


def _more(*values):
    return pytest.param(*values, marks=MORE)


@pytest.mark.parametrize(
    ("shape", "dtype", "cache", "window", "before", "rows"),
    [
        (AttentionShape(1, 1, 64, 64), mx.float16, None, None, 700, 8),  # in parts
        _more(AttentionShape(8, 2, 128, 128), mx.bfloat16, None, None, 150, 8),  # 32 packed rows
        (AttentionShape(4, 1, 96, 96), mx.float16, mx.int8, 20, 77, 5),
        _more(AttentionShape(2, 1, 256, 256), mx.bfloat16, mx.uint8, 33, 100, 8),
        _more(AttentionShape(4, 1, 192, 192), mx.float16, None, None, 70, 3),
        _more(AttentionShape(1, 1, 512, 512), mx.float32, None, None, 40, 3),
        (AttentionShape(16, 1, 576, 512), mx.bfloat16, None, None, 40, 3),
        _more(AttentionShape(16, 1, 576, 512), mx.bfloat16, mx.uint8, None, 40, 2),
    ],
    ids=str,
)
def test_a_row_alone_equals_the_same_row_among_drafts_to_the_bit(
    shape, dtype, cache, window, before, rows
):
    """With any number of drafts, and any other requests that verify drafts."""
    rng = np.random.default_rng(6)
    batch = make_batch(rng, [(before, rows), (9, 1)], shape, dtype, cache)
    with kernel.using(metal_kernel):
        together = attend(batch, window)
        for row in range(rows):
            alone = attend(row_alone(batch, row), window)
            assert mx.array_equal(alone[0], together[row]), row


@pytest.mark.parametrize(
    "splits",
    [pytest.param(Splits(fixed=256), id="fixed"), pytest.param(DEFAULT, id="not", marks=MORE)],
)
def test_with_fixed_parts_so_it_does_in_more_rows_than_a_tile_holds(splits):
    """Packs 48 rows of 8 heads, which by default would leave tiles of 64 to prefill."""
    batch = make_batch(
        np.random.default_rng(6), [(270, 6), (9, 1)], AttentionShape(8, 1, 64, 64), mx.float16
    )
    with kernel.using(metal_kernel):
        together = attend(batch, splits=splits)
        alone = [attend(row_alone(batch, row), splits=splits)[0] for row in range(6)]
    same = [bool(mx.array_equal(one, other)) for one, other in zip(alone, together, strict=False)]
    assert all(same) == (splits.fixed is not None)


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("decode", mx.uint8),
        ("verify", None),
        ("prefill", mx.uint8),
        _more("decode", None),
        _more("verify", mx.uint8),
        _more("prefill", None),
    ],
    ids=str,
)
def test_what_lies_before_the_window_changes_nothing(kind, cache):
    """A block's last owner may have left NaN; not even zeros times NaN may count."""
    window, shape = 7, AttentionShape(4, 2, 64, 64)
    steps = [(before + 30, rows) for before, rows in STEPS[kind]]
    batch = make_batch(np.random.default_rng(7), steps, shape, mx.float16, cache)
    arrays = [batch.key_pool, batch.value_pool]
    if cache is not None:
        arrays = [batch.key_scales, batch.value_scales]
    spoiled = [mx.array(array) for array in arrays]
    for table, (before, _) in zip(batch.tables, steps, strict=True):
        unseen = np.arange(before - window + 1)
        for array in spoiled:
            array[:, mx.array(table[unseen // 16]), mx.array(unseen % 16)] = float("nan")
    names = ("key_pool", "value_pool") if cache is None else ("key_scales", "value_scales")
    with kernel.using(metal_kernel):
        wanted = attend(batch, window)
        found = attend(replace(batch, **dict(zip(names, spoiled, strict=True))), window)
    assert mx.array_equal(found, wanted)


def test_decode_and_prefill_in_any_order():
    batch = make_batch(
        np.random.default_rng(3),
        [(30, 20), (17, 1), (0, 40), (99, 1), (5, 1)],
        AttentionShape(6, 2, 64, 64),
        mx.float32,
    )
    checker = Checker()
    check(batch, checker.metal_kernel)
    assert [dispatch.kernel for dispatch in checker.dispatches] == ["decode", "prefill"]


@pytest.mark.parametrize("kind", [_more("decode"), "verify", _more("prefill")])
def test_the_reference_agrees(kind):
    batch = make_batch(
        np.random.default_rng(4), STEPS[kind], AttentionShape(6, 2, 80, 80), mx.float32
    )
    sinks = mx.array([0.5, -1.0, 2.0, 0.0, 1.0, 3.0])
    with kernel.using(metal_kernel):
        found = attend(batch, window=9, softcap=4.0, sinks=sinks)
    num_tokens = batch.queries.shape[0]
    plan = buckets.plan(
        batch.starts, batch.seq_lens, batch.tables, np.full(num_tokens, -1), 16, window=9
    )
    pools = (mx.nan_to_num(pool) for pool in (batch.key_pool, batch.value_pool))
    wanted = reference.run(plan, batch.queries, None, None, *pools, SCALE, sinks, softcap=4.0)
    assert mx.abs(found - wanted).max() < 1e-5


@pytest.mark.slow
@pytest.mark.heavy
def test_pools_past_the_range_of_32_bits():
    """Uses slots with K and V elements beyond 2^32."""
    num_blocks = 2**32 // (16 * 64) + 4
    pool = mx.zeros((1, num_blocks, 16, 64), mx.int8)
    scales = mx.zeros((1, num_blocks, 16), mx.bfloat16)
    rows = np.random.default_rng(5).integers(-126, 127, (30, 1, 64)).astype(np.float32)
    rows[:, :, 0] = 127.0  # so that each row's scale is 1
    tables = np.array([[num_blocks - 1, num_blocks - 3]], np.int32)
    slots = (tables[0][:, None] * 16 + np.arange(16)).ravel()[:30]
    shape = AttentionShape(2, 1, 64, 64)
    queries = mx.array(np.random.default_rng(6).normal(0, 0.01, (30, 2, 64)).astype(np.float32))
    with kernel.using(metal_kernel):
        fence = kv_write.write(mx.array(rows), None, mx.array(slots), pool, None, key_scales=scales)
        for first, rows_now in ((0, 30), (29, 1)):  # prefill, decode
            starts, seq_lens = np.array([0, rows_now], np.int32), np.array([30], np.int32)
            plan = paged_attention.plan(starts, seq_lens, tables, shape)
            found, _ = paged_attention.run(
                plan,
                queries[first:],
                pool,
                pool,
                fence,
                0.1,
                key_scales=scales,
                value_scales=scales,
            )
            context = rows.astype(np.float64)
            batch = Batch(
                shape,
                starts,
                seq_lens,
                tables,
                queries[first:],
                pool,
                pool,
                scales,
                scales,
                [(context, context)],
            )
            np.testing.assert_allclose(np.array(found), expected(batch, 0.1), atol=1e-3)


BAD = {
    "queries": ({"queries": mx.zeros((3, 4, 64))}, "queries: expected"),
    "dtype": ({"queries": mx.zeros((2, 4, 64), mx.int32)}, "int32 are not supported"),
    "pool dtype": ({"key_pool": mx.zeros((2, 3, 16, 64), mx.float16)}, "key_pool: expected"),
    "pool shape": ({"key_pool": mx.zeros((1, 3, 16, 64))}, "key_pool: expected"),
    "value pool": ({"value_pool": mx.zeros((2, 4, 16, 64))}, "value_pool: expected"),
    "block size": ({"key_pool": mx.zeros((2, 3, 8, 64))}, "block_size 8"),
    "scales": ({"key_scales": mx.zeros((2, 3, 16))}, "key_scales: expected None"),
    "sinks": ({"sinks": mx.zeros(3)}, "sinks: expected"),
}


@pytest.mark.parametrize("case", BAD)
def test_arguments_that_do_not_fit_are_named(case):
    starts, seq_lens = np.array([0, 1, 2], np.int32), np.array([5, 7], np.int32)
    plan = paged_attention.plan(
        starts, seq_lens, np.array([[0], [1]], np.int32), AttentionShape(4, 2, 64, 64)
    )
    arguments = {
        "queries": mx.zeros((2, 4, 64)),
        "key_pool": mx.zeros((2, 3, 16, 64)),
        "value_pool": mx.zeros((2, 3, 16, 64)),
    }
    wrong, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        paged_attention.run(plan, **(arguments | wrong), after=FENCE, scale=1.0)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (AttentionShape(4, 2, 72, 72), "head size 72"),
        (AttentionShape(4, 1, 128, 64), "keys and values of sizes"),
        (AttentionShape(5, 2, 64, 64), "do not divide"),
    ],
)
def test_layers_that_are_not_served_are_named(shape, message):
    assert message in paged_attention.unsupported(shape, mx.float16, 16)
    assert paged_attention.unsupported(AttentionShape(4, 2, 64, 64), mx.float16, 16) is None
