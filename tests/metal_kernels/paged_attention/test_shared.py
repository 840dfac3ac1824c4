# SPDX-License-Identifier: Apache-2.0
"""Decode reads shared prefixes once, with correct results."""

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metal_interpreter import Checker, metal_kernel
from pairs import pairwise

from metal_kernels import kernel, paged_attention
from metal_kernels.layout import PositionLag
from metal_kernels.pace import MOST_WORK
from metal_kernels.paged_attention import AttentionShape, Splits, Tiles, plan, trials
from metal_kernels.paged_attention.op import HEAD_SIZES, LATENT_SIZES, SIZES_APART
from metal_kernels.paged_attention.splits import MOST_RESULTS
from metal_kernels.plan_arrays import all_else, with_arrays
from tests.metal_kernels.paged_attention.batches import expected, make_batch, overstated

SCALE = 0.09
FENCE = mx.zeros(8, mx.uint32)
DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
CACHES = {"same": None, "fp8": mx.uint8, "int8": mx.int8}
SCHEDULES = ("forward", "reverse", "random:1")


def plan_of(batch, block_size=16, most_behind=0, shared=0, **options):
    """Makes a plan that shares prefixes that save `shared` keys."""
    seq_lens, tables, lag = batch.seq_lens, batch.tables, None
    if most_behind:
        seq_lens, tables, lag = overstated(batch, most_behind)
    tiles = replace(Tiles.for_layer(batch.shape, options.get("window")), shared=shared)
    return plan(
        batch.starts,
        seq_lens,
        tables,
        batch.shape,
        tiles=tiles,
        lag=lag,
        block_size=block_size,
        **options,
    )


def check(batch, made, schedule="forward", softcap=None, sinks=None, window=None):
    with kernel.using(Checker(schedule).metal_kernel):
        out, fences = paged_attention.run(
            made,
            batch.queries,
            batch.key_pool,
            batch.value_pool,
            FENCE,
            SCALE,
            softcap=softcap,
            sinks=sinks,
            key_scales=batch.key_scales,
            value_scales=batch.value_scales,
        )
        mx.eval(out, fences)
    assert len(fences) == sum(len(dispatch.launches) for dispatch in made.dispatches)
    wanted_sinks = None if sinks is None else np.array(sinks.astype(mx.float32), np.float64)
    wanted = expected(batch, SCALE, window, softcap, wanted_sinks)
    largest = max(np.abs(values).max() for _, values in batch.contexts)
    atol = float(mx.finfo(out.dtype).eps) * largest + 1e-5  # as in test_op.py
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), wanted, atol=atol, rtol=0)


# Each request's (computed, rows): decodes and drafts, a prompt, one that shares nothing.
REQUESTS = [(52, 1), (49, 1), (75, 3), (40, 30), (20, 1), (330, 1), (310, 2)]
ALIKE = [((0, 1, 2, 3), 3), ((5, 6), 18)]


def check_features(rng, shape, dtype, cache_dtype):
    for (block_size, softcap, with_sinks, splits), schedule in zip(
        [(16, None, True, Splits()), (16, 5.0, False, Splits(slots=2**30)), (32, 4.0, True, None)],
        SCHEDULES,
        strict=True,
    ):
        alike = [(members, count * 16 // block_size) for members, count in ALIKE]
        batch = make_batch(rng, REQUESTS, shape, dtype, cache_dtype, block_size, alike)
        made = plan_of(batch, block_size, splits=splits or Splits())
        assert any(dispatch.shared is not None for dispatch in made.dispatches)
        sinks = mx.array(rng.normal(size=shape.num_heads)).astype(dtype) if with_sinks else None
        check(batch, made, schedule, softcap, sinks)


def test_every_feature():
    """Runs each in its own schedule, over codes; each row's tiles read their scales."""
    check_features(np.random.default_rng(2), AttentionShape(4, 2, 64, 64), mx.float16, mx.uint8)


@pytest.mark.slow
@pairwise(
    sizes=[*((size, size) for size in HEAD_SIZES), *SIZES_APART, *LATENT_SIZES],
    dtype=list(DTYPES),
    cache=list(CACHES),
    group=[1, 3],
)
def test_every_combination(sizes, dtype, cache, group):
    heads = 1 if sizes in LATENT_SIZES else 2
    shape = AttentionShape(group * heads, heads, *sizes)
    check_features(np.random.default_rng(sizes[0]), shape, DTYPES[dtype], CACHES[cache])


@st.composite
def batches(draw, most_before=300):
    """Draws requests and groups that share prefixes: (computed, rows), (members, blocks)."""
    request = st.tuples(st.integers(0, most_before), st.integers(1, 4))
    requests = draw(st.lists(request, min_size=2, max_size=7))
    owners = draw(st.lists(st.integers(0, 2), min_size=len(requests), max_size=len(requests)))
    alike = []
    for group in range(2):
        members = tuple(i for i, owner in enumerate(owners) if owner == group)
        if len(members) > 1:
            fewest = min(sum(requests[member]) - 1 for member in members) // 16
            alike.append((members, draw(st.integers(0, fewest))))
    return requests, [(members, count) for members, count in alike if count]


@pytest.mark.more
@settings(max_examples=15)
@given(
    batch=batches(),
    heads=st.sampled_from([(1, 1), (2, 1), (9, 3), (8, 1)]),
    splits=st.sampled_from([Splits(), Splits(slots=2**30)]),
    most_behind=st.integers(0, 3),
    share=st.sampled_from([1.0, 0.5]),
    schedule=st.sampled_from(["forward", "reverse"]) | st.integers(0, 99).map("random:{}".format),
    seed=st.integers(0, 2**16),
)
def test_ragged_batches(batch, heads, splits, most_behind, share, schedule, seed):
    requests, alike = batch
    made_of = make_batch(
        np.random.default_rng(seed),
        requests,
        AttentionShape(*heads, 64, 64),
        mx.float16,
        alike=alike,
    )
    work = int(plan_of(made_of).work * share) if share < 1 else MOST_WORK
    made = plan_of(made_of, most_behind=most_behind, splits=splits, most_work=max(work, 1))
    check(made_of, made, schedule)


def seen_by_rows(made, tables, block_size):
    """Returns the slots that each batch row and head of its group sees, with repetitions."""
    seen = {}
    for dispatch in made.dispatches:
        joined = None if dispatch.splits is None else np.array(dispatch.splits).tolist()
        for launch in dispatch.launches:
            listed = launch.listed
            described = np.array(launch.requests)
            written = set()
            for owner, begin, count, first, end, split, parts, table in np.array(launch.tiles):
                for packed in range(begin, begin + count):
                    row, head = divmod(int(packed), made.shape.group)
                    of_row, row = (described[owner + row], 0) if listed else (described[owner], row)
                    out = int(of_row[1]) + row * parts + split
                    assert out >= 0 and (out, head) not in written
                    written.add((out, head))
                    last = min(end, of_row[2] + row + 1, of_row[3])
                    positions = np.arange(first, max(last, first))
                    slots = tables[table if listed else owner, positions // block_size] * block_size
                    slots = (slots + positions % block_size).tolist()
                    seen.setdefault((int(of_row[0]) + row, head), []).extend(slots)
            if joined is not None:  # each part that is joined was written, and nothing else
                at = 2 if listed else 0
                parts = [
                    row[at] + part
                    for row in joined[: dispatch.num_rows]
                    for part in range(row[at + 1])
                ]
                assert sorted(parts) == sorted({out for out, _ in written})
                assert max(parts, default=0) < launch.part_rows
    return seen


@settings(max_examples=25)
@given(
    batch=batches(2000),
    shape=st.sampled_from(
        [
            AttentionShape(8, 2, 64, 64),
            AttentionShape(11, 1, 128, 128),
            AttentionShape(2, 1, 512, 512),
            AttentionShape(20, 1, 576, 512),
        ]
    ),
    block_size=st.sampled_from([16, 32]),
    share=st.sampled_from([1.0, 0.7, 0.2]),
)
def test_every_row_sees_its_context_once(batch, shape, block_size, share):
    requests, alike = batch
    counts = np.array([rows for _, rows in requests], np.int32)
    seq_lens = counts + np.array([before for before, _ in requests], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tables = np.arange(len(requests) * 200, dtype=np.int32).reshape(-1, 200)
    for members, count in alike:
        shared = count * 16 // block_size
        tables[list(members), :shared] = tables[members[0], :shared]
    tiles = replace(Tiles.for_layer(shape), shared=0)
    options = {"tiles": tiles, "block_size": block_size}
    apart = plan(starts, seq_lens, tables, shape)
    bound = MOST_WORK if share == 1 else int(share * apart.work)
    made = plan(starts, seq_lens, tables, shape, most_work=bound, **options)
    seen = seen_by_rows(made, tables, block_size)
    assert len(seen) == starts[-1] * shape.group
    for (row, _), slots in seen.items():
        owner = int(np.searchsorted(starts, row, side="right")) - 1
        positions = np.arange(seq_lens[owner] - (starts[owner + 1] - row) + 1)
        wanted = tables[owner, positions // block_size] * block_size + positions % block_size
        assert sorted(slots) == sorted(wanted.tolist())
    # Sharing is no more work than what it replaces, so that no dispatch exceeds its bound.
    assert made.work <= plan(starts, seq_lens, tables, shape, most_work=bound).work
    # And nothing is launched that the start has not compiled.
    tried = {pipeline for trial in trials(shape, None, tiles) for pipeline in trial.pipelines}
    assert set(made.pipelines) <= tried


SHAPE = AttentionShape(8, 2, 128, 128)


def decoding(lens, common, shape=SHAPE, tables=None, **options):
    """Makes a dispatch of decoding requests that share `common` positions."""
    lens = np.array(lens, np.int32)
    width = -(-int(lens.max()) // 16)
    tables = np.arange(len(lens) * width, dtype=np.int32).reshape(-1, width)
    tables[:, : common // 16] = tables[0, : common // 16]
    starts = np.arange(len(lens) + 1, dtype=np.int32)
    (made,) = plan(starts, lens, tables, shape, block_size=16, **options).dispatches
    return made


def test_a_beginning_is_shared_from_the_threshold_on():
    """Eight tiles of a query row read it separately, and one reads it shared."""
    least = Tiles.for_layer(SHAPE).shared
    common = -(-least // 7 // 16) * 16
    assert decoding([2000] * 8, common).shared is not None
    assert decoding([2000] * 8, common - 16).shared is None
    tiles = replace(Tiles.for_layer(SHAPE), shared=least * 2)
    assert decoding([2000] * 8, common, tiles=tiles).shared is None
    assert decoding([2000] * 8, 2 * common, tiles=tiles).shared is not None


@pytest.mark.parametrize(
    "options",
    [
        {"tiles": replace(Tiles.for_layer(SHAPE), shared=None)},
        {"tiles": replace(Tiles.for_layer(SHAPE), split=False)},
        {"window": 100_000},
        {"splits": Splits(fixed=512)},
        {"shape": AttentionShape(64, 2, 128, 128)},  # its rows fill a tile without others
        {"shape": AttentionShape(128, 1, 576, 512)},
    ],
    ids=str,
)
def test_nothing_is_shared_where_it_is_not_wanted_or_saves_nothing(options):
    assert decoding([9000] * 8, 8000).shared is not None
    assert decoding([9000] * 8, 8000, **options).shared is None


def test_a_row_is_part_of_what_a_request_shares_only_where_all_its_rows_see_it():
    """Leaves out blocks that a request's row, or its earliest possible one, sees in part."""
    batch = make_batch(
        np.random.default_rng(0), [(600, 1)] * 8, SHAPE, mx.float16, alike=[(range(8), 37)]
    )
    (made,) = plan_of(batch).dispatches
    assert np.array(made.shared.tiles)[:, 4].max() == 37 * 16
    batch = replace(batch, seq_lens=batch.seq_lens - 9)  # the last row's position is 591
    assert np.array(plan_of(batch).dispatches[0].shared.tiles)[:, 4].max() == 36 * 16
    lag = PositionLag(mx.zeros(8, mx.int32), np.full(8, 16, np.int32))
    made = plan(
        batch.starts,
        batch.seq_lens,
        batch.tables,
        SHAPE,
        lag=lag,
        block_size=16,
        tiles=replace(Tiles.for_layer(SHAPE), shared=0),
    )
    assert np.array(made.dispatches[0].shared.tiles)[:, 4].max() == 35 * 16


@pytest.mark.parametrize("length", [2000, 60000])
@pytest.mark.parametrize("num_requests", [8, 256, 1000])
def test_the_results_of_parts_stay_within_their_memory(num_requests, length):
    shape = AttentionShape(64, 8, 128, 128)
    made = decoding([length] * num_requests, length // 2, shape, most_work=2**62)
    results = sum(launch.part_rows for launch in made.launches) * 64 * 128 * 4
    assert results <= 1.15 * MOST_RESULTS  # room for parts of steps to come: a seventh
    assert (made.shared is None) == (num_requests == 1000)


def test_a_step_without_shared_prefixes_is_planned_as_ever():
    found, wanted = [], []
    starts, lens = np.arange(9, dtype=np.int32), np.full(8, 3000, np.int32)
    tables = np.arange(8 * 188, dtype=np.int32).reshape(8, 188)
    made = plan(starts, lens, tables, SHAPE, block_size=16)
    assert all_else(made, found) == all_else(plan(starts, lens, tables, SHAPE), wanted)
    assert all(mx.array_equal(*pair) for pair in zip(found, wanted, strict=True))


def test_shapes_stay_while_the_requests_that_share_grow():
    """The next step reuses the graph with its arrays."""
    lens = np.array([900, 1350, 1200, 800, 1700, 2000, 1000, 1010])

    def arrays(step):
        found = []
        made = decoding(lens + step, 784, tiles=replace(Tiles.for_layer(SHAPE), shared=0))
        return made, all_else(made, found), found

    steps = [arrays(step) for step in range(200)]
    assert all(made.shared is not None for made, _, _ in steps)
    assert sum(before[1] != after[1] for before, after in itertools.pairwise(steps)) <= 4
    _, kind, found = steps[0]
    other = with_arrays(steps[1][0], iter(found))
    assert all_else(other, again := []) == kind
    assert all(mx.array_equal(*pair) for pair in zip(found, again, strict=True))


@pytest.mark.parametrize("rows", [1, pytest.param(3, marks=pytest.mark.more)])
def test_with_fixed_splits_a_row_has_the_same_bits_in_any_company(rows):
    rng = np.random.default_rng(8)
    batch = make_batch(
        rng, [(600, rows)] * 4, AttentionShape(4, 2, 64, 64), mx.float16, alike=[(range(4), 30)]
    )
    alone = replace(
        batch,
        starts=batch.starts[:2],
        seq_lens=batch.seq_lens[:1],
        tables=batch.tables[:1],
        queries=batch.queries[:rows],
    )
    found = []
    for one in (batch, alone):
        made = plan_of(one, splits=Splits(fixed=256))
        with kernel.using(metal_kernel):
            out, _ = paged_attention.run(
                made, one.queries, one.key_pool, one.value_pool, FENCE, SCALE
            )
        found.append(out[:rows])
    assert mx.array_equal(*found)
