# SPDX-License-Identifier: Apache-2.0
"""A plan's tiles cover every query row, and all of its visible context, once."""

from functools import cache
from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_kernels.pace import MOST_WORK
from metal_kernels.paged_attention import AttentionShape, Splits, Tiles, plan, trials
from metal_kernels.paged_attention.op import HEAD_SIZES, SIZES_APART
from metal_kernels.plan_arrays import all_else
from metal_kernels.selfcheck import Case, checks
from metal_kernels.selfcheck.case import Check

shapes = st.builds(
    lambda group, heads, size: AttentionShape(group * heads, heads, size, size),
    st.sampled_from([1, 2, 3, 4, 7, 8, 16, 71]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(HEAD_SIZES),
) | st.builds(lambda heads: AttentionShape(heads, 1, 576, 512), st.sampled_from([16, 40, 128]))
request = st.tuples(st.integers(0, 5000), st.integers(1, 8) | st.integers(1, 200))
LLAMA = AttentionShape(32, 8, 128, 128)


def work_of(dispatch, shape):
    """Returns FLOPs by the tiles: rows of a tile, but at least 16."""
    keys = sum(max(0, end - begin) for _, _, _, begin, end, *_ in np.array(dispatch.tiles).tolist())
    pair = 2 * (shape.head_size + shape.value_size)
    return max(16, dispatch.rows) * keys * shape.num_kv_heads * pair


def check_work(made, bound):
    for dispatch in made.dispatches:
        assert dispatch.work == work_of(dispatch, made.shape)
        # A tile is the least that a dispatch can do, and so is a row of more than one.
        if dispatch.num_rows > max(1, dispatch.rows // made.shape.group):
            assert dispatch.work <= bound


def rows_of_parts(dispatch):
    """Returns the output row and part of each row that tiles write."""
    if dispatch.splits is None:
        return {row: (row, 0) for row in range(dispatch.num_rows)}
    joined = np.array(dispatch.splits)[: dispatch.num_rows, :2].tolist()
    found = {first + s: (row, s) for row, (first, count) in enumerate(joined) for s in range(count)}
    assert len(found) == sum(count for _, count in joined)  # no two share a row
    assert max(found) < dispatch.part_rows
    return found


@settings(max_examples=25)
@given(
    requests=st.lists(request, min_size=1, max_size=8),
    shape=shapes,
    window=st.sampled_from([None, 1, 5, 64, 512]),
    share=st.sampled_from([1.0, 0.7, 0.2, 0.01]),
)
def test_every_row_sees_its_context_once(requests, shape, window, share):
    """In one dispatch, or in several if a share of the work is the bound."""
    counts = np.array([rows for _, rows in requests], np.int32)
    seq_lens = counts + np.array([before for before, _ in requests], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tables = np.zeros((len(requests), 400), np.int32)
    whole = plan(starts, seq_lens, tables, shape, window)
    bound = MOST_WORK if share == 1.0 else int(share * whole.work)
    made = plan(starts, seq_lens, tables, shape, window, most_work=bound)
    check_work(made, bound)

    row_of_output = []
    seen = {}  # (batch row, head of the group) -> visible positions, in the order of the splits
    for dispatch in made.dispatches:
        described = np.array(dispatch.requests)
        of_output = np.full(dispatch.num_rows, -1)
        joined = rows_of_parts(dispatch)
        tiles = np.array(dispatch.tiles)
        num_made = np.count_nonzero(tiles[:, 2])
        assert not tiles[num_made:].any()  # room for more is behind them, and has no rows
        for owner, begin, count, first_key, end, split, parts, _ in tiles[:num_made]:
            assert first_key % 4 == 0 and 0 < count <= dispatch.rows
            first_row, first_out, first_position, _ = described[owner]
            for packed in range(begin, begin + count):
                row, head = divmod(int(packed), shape.group)
                position = first_position + row
                out_row, part = joined[first_out + row * parts + split]
                assert part == split < parts
                of_output[out_row] = first_row + row
                oldest = 0 if window is None else max(0, position - window + 1)
                visible = range(max(first_key, oldest), min(end, position + 1))
                seen.setdefault((first_row + row, head), {})[int(split)] = visible
        row_of_output.extend(of_output)
    assert len(seen) == starts[-1] * shape.group
    for index, (before, rows) in enumerate(requests):
        for row in range(rows):
            position = before + row
            oldest = 0 if window is None else max(0, position - window + 1)
            for head in range(shape.group):
                parts = seen[starts[index] + row, head]
                assert sorted(parts) == list(range(len(parts)))  # none is left unwritten
                covered = [key for split in sorted(parts) for key in parts[split]]
                assert covered == list(range(oldest, position + 1))
    if made.order is None:
        assert row_of_output == list(range(starts[-1]))
    else:
        assert np.array(row_of_output)[np.array(made.order)].tolist() == list(range(starts[-1]))


@settings(max_examples=25)
@given(
    requests=st.lists(request | st.tuples(st.integers(0, 400), st.just(5)), min_size=1, max_size=8),
    shape=shapes,
    window=st.sampled_from([None, 1, 5, 64, 512]),
    splits=st.sampled_from([Splits(), Splits(slots=2**20), Splits(fixed=256)]),
)
def test_rows_in_one_tile_need_no_other_plan_to_see_later_ones(requests, shape, window, splits):
    lens = np.array([rows for _, rows in requests], np.int32)
    seq_lens = lens + np.array([before for before, _ in requests], np.int32)
    tables = np.arange(len(lens) * 400, dtype=np.int32).reshape(len(lens), 400)
    parts = np.append(0, lens.cumsum()).astype(np.int32), seq_lens, tables, shape, window

    def listed(made):
        arrays = []
        return all_else(made, arrays), [array.tolist() for array in arrays]

    found = plan(*parts, splits=splits).seeing_later_rows
    if found is not None:
        assert listed(found) == listed(plan(*parts, splits=splits, bidirectional=True))
    assert (found is not None) >= (lens.max() * shape.group <= 8)


def test_decode_steps_keep_their_shapes_while_contexts_grow():
    """The next step reuses the graph: block tables, tiles and parts keep their sizes."""

    def shapes(seq_lens):
        starts = np.arange(len(seq_lens) + 1, dtype=np.int32)
        table = np.zeros((len(seq_lens), -(-int(seq_lens.max()) // 16)), np.int32)
        found: list[mx.array] = []
        made = plan(starts, seq_lens, table, AttentionShape(8, 2, 64, 64))
        return all_else(made, found)

    seq_lens = np.array([900, 350, 1200, 40, 700, 2000], np.int32)
    kinds = [shapes(seq_lens + step) for step in range(1000)]
    assert sum(before != after for before, after in pairwise(kinds)) <= 12


def test_verify_windows_of_any_length_share_one_dispatch_with_decodes():
    shape = AttentionShape(8, 2, 128, 128)
    starts, seq_lens = np.array([0, 1, 6, 14], np.int32), np.array([40, 60, 33], np.int32)
    (dispatch,) = plan(starts, seq_lens, np.zeros((3, 4), np.int32), shape).dispatches
    assert dispatch.decode and dispatch.num_tiles == 3  # K/V of a request are read once


@pytest.mark.parametrize(
    ("shape", "decoded", "tiles"),
    [
        (LLAMA, 8, 1),  # 8 rows of 4 heads
        (AttentionShape(8, 1, 256, 256), 2, 1),
        (AttentionShape(8, 1, 512, 512), 1, 1),
        (AttentionShape(16, 1, 576, 512), 8, 2),  # tiles of a query row
        (AttentionShape(71, 1, 64, 64), 0, 0),
    ],
    ids=str,
)
def test_a_neighbor_moves_nobody_to_another_kernel(shape, decoded, tiles):
    """A request's kernel depends on its own number of rows alone."""
    for rows in range(1, 20):
        for neighbor in (1, 5, 64):
            starts = np.array([0, rows, rows + neighbor], np.int32)
            seq_lens = np.array([100, 90], np.int32)
            made = plan(starts, seq_lens, np.zeros((2, 8), np.int32), shape)
            kinds = {
                owner: (dispatch.decode, np.array(dispatch.tiles)[:, 0].tolist().count(owner))
                for dispatch in made.dispatches
                for owner, _, count, *_ in np.array(dispatch.tiles).tolist()
                if count
            }
            assert kinds[0][0] == (rows <= decoded)
            if rows == 1 and tiles and neighbor == 64:
                assert kinds[0][1] == tiles


WIDE = 131072  # positions

LONG_STEPS = {
    "the largest step": ([(WIDE - 2048, 2048)], 16),
    "a chunk among decodes": ([(WIDE - 512, 512)] + [(WIDE - 1, 1)] * 200, None),
    "decodes": ([(WIDE - 1, 1)] * 256, 8),
    "drafts to verify": ([(WIDE - 5, 5)] * 200, None),
}


@pytest.mark.parametrize("kind", LONG_STEPS)
@pytest.mark.parametrize(
    "shape",
    [
        LLAMA,
        AttentionShape(32, 32, 64, 64),
        AttentionShape(8, 1, 256, 256),
        AttentionShape(128, 1, 576, 512),
    ],
    ids=str,
)
def test_no_dispatch_of_long_contexts_exceeds_the_bound(kind, shape):
    requests, expected = LONG_STEPS[kind]
    counts = np.array([rows for _, rows in requests], np.int32)
    seq_lens = counts + np.array([before for before, _ in requests], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    made = plan(starts, seq_lens, np.zeros((len(requests), WIDE // 16), np.int32), shape)
    check_work(made, MOST_WORK)
    assert sum(dispatch.num_rows for dispatch in made.dispatches) == starts[-1]
    # None could take in the next one, so that there are few.
    both = [x.work + y.work for x, y in pairwise(made.dispatches) if x.decode == y.decode]
    assert all(work > 0.95 * MOST_WORK for work in both)
    if shape == LLAMA and expected:
        assert len(made.dispatches) == expected


def test_steps_of_usual_contexts_stay_one_dispatch():
    for requests in ([(0, 2048)], [(2048, 2048)], [(8191, 1)] * 64):
        counts = np.array([rows for _, rows in requests], np.int32)
        seq_lens = counts + np.array([before for before, _ in requests], np.int32)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tables = np.zeros((len(requests), 512), np.int32)
        assert len(plan(starts, seq_lens, tables, LLAMA).dispatches) == 1


@given(
    shape=shapes,
    rows=st.lists(st.integers(1, 9) | st.integers(1, 99), min_size=1, max_size=5),
    data=st.data(),
)
def test_a_plan_keeps_to_the_tiles_it_is_given(shape, rows, data):
    sizes = Tiles.for_layer(shape)
    kept = data.draw(st.sets(st.sampled_from([*sizes.decode, *sizes.prefill]), min_size=1))
    given_tiles = Tiles(
        tuple(size for size in sizes.decode if size in kept),
        tuple(size for size in sizes.prefill if size in kept),
        split=data.draw(st.booleans()),
    )
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    seq_lens = np.diff(starts) + 700
    tables = np.zeros((len(rows), 100), np.int32)
    whole, made = (
        plan(starts, seq_lens, tables, shape, tiles=tiles) for tiles in (None, given_tiles)
    )
    assert all(x.rows in (sizes.decode if x.decode else sizes.prefill) for x in whole.dispatches)
    for dispatch in made.dispatches:
        allowed = given_tiles.decode if dispatch.decode else given_tiles.prefill
        assert dispatch.rows in allowed
        assert given_tiles.split or dispatch.num_splits == 1
    assert sum(dispatch.num_rows for dispatch in made.dispatches) == starts[-1]


@cache
def tried(shape, window):
    every = trials(shape, window, Tiles.for_layer(shape, window))
    return {pipeline for trial in every for pipeline in trial.pipelines}


@given(
    requests=st.lists(request, min_size=1, max_size=8),
    shape=shapes | st.sampled_from([AttentionShape(16, 2, *sizes) for sizes in SIZES_APART]),
    window=st.sampled_from([None, 1, 5, 253, 512]),
    fixed=st.sampled_from([None, 256]),
)
def test_what_a_plan_launches_is_tried_and_checked_before_it_serves(requests, shape, window, fixed):
    lens = np.array([sum(of_request) for of_request in requests], np.int32)
    starts = np.cumsum([0, *(rows for _, rows in requests)]).astype(np.int32)
    table = np.zeros((len(requests), -(-lens.max() // 16)), np.int32)
    made = plan(starts, lens, table, shape, window, splits=Splits(fixed=fixed))
    assert set(made.pipelines) <= tried(shape, window)
    checked = checks(Case(shape, mx.float16, mx.float16, 16, window))
    for decode, rows, in_parts, wide in made.pipelines:
        assert Check("decode" if decode else "prefill", rows, wide) in checked
        assert not in_parts or Check("reduce") in checked


def test_a_tile_that_reaches_into_a_second_row_is_tried_in_parts():
    """A tile of one row sees one key less and is not split."""
    shape, window, table = AttentionShape(71, 1, 64, 64), 253, np.zeros((1, 17), np.int32)
    made = plan(np.array([0, 9], np.int32), np.array([257], np.int32), table, shape, window)
    every = trials(shape, window, Tiles.for_layer(shape, window))
    tried = [dispatch for trial in every for dispatch in trial.dispatches]
    found, launched = (
        {(d.decode, d.rows, d.num_splits > 1) for d in dispatches}
        for dispatches in (tried, made.dispatches)
    )
    assert (False, 64, True) in launched and launched <= found
