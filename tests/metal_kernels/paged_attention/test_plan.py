# SPDX-License-Identifier: Apache-2.0
"""A plan's tiles cover every query row, and all of its visible context, once."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_kernels.paged_attention import AttentionShape, plan
from metal_kernels.paged_attention.op import HEAD_SIZES

shapes = st.builds(
    lambda group, heads, size: AttentionShape(group * heads, heads, size, size),
    st.sampled_from([1, 2, 3, 4, 7, 8, 16, 71]),
    st.sampled_from([1, 2, 8]),
    st.sampled_from(HEAD_SIZES),
) | st.builds(lambda heads: AttentionShape(heads, 1, 576, 512), st.sampled_from([16, 40, 128]))
request = st.tuples(st.integers(0, 5000), st.integers(1, 8) | st.integers(1, 200))


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(request, min_size=1, max_size=8),
    shape=shapes,
    window=st.sampled_from([None, 1, 5, 64, 512]),
)
def test_every_row_sees_its_context_once(requests, shape, window):
    counts = np.array([rows for _, rows in requests], np.int32)
    seq_lens = counts + np.array([before for before, _ in requests], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tables = np.zeros((len(requests), 400), np.int32)
    made = plan(starts, seq_lens, tables, shape, window)

    row_of_output = []
    seen = {}  # (batch row, head of the group) -> visible positions, in the order of the splits
    for dispatch in made.dispatches:
        described = np.array(dispatch.requests)
        splits = None if dispatch.splits is None else np.array(dispatch.splits)
        of_output = np.full(dispatch.num_rows, -1)
        for owner, begin, count, first_key, end, split, *_ in np.array(dispatch.tiles):
            assert first_key % 4 == 0 and 0 < count <= dispatch.rows
            first_row, first_out, first_position, _ = described[owner]
            for packed in range(begin, begin + count):
                row, head = divmod(int(packed), shape.group)
                position = first_position + row
                of_output[first_out + row] = first_row + row
                oldest = 0 if window is None else max(0, position - window + 1)
                visible = range(max(first_key, oldest), min(end, position + 1))
                seen.setdefault((first_row + row, head), {})[int(split)] = visible
                if splits is None:
                    assert split == 0
                else:
                    assert split < splits[first_out + row]
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


def test_a_long_context_alone_is_split_and_a_full_batch_is_not():
    shape = AttentionShape(32, 8, 128, 128)

    def num_splits(count):
        starts = np.arange(count + 1, dtype=np.int32)
        seq_lens = np.full(count, 8192, np.int32)
        (dispatch,) = plan(starts, seq_lens, np.zeros((count, 512), np.int32), shape).dispatches
        return dispatch.num_splits

    assert num_splits(1) == 16  # 128 threadgroups of 512 keys
    assert num_splits(32) == 1  # 256 threadgroups already


def test_verify_windows_of_any_length_share_one_dispatch():
    shape = AttentionShape(8, 2, 128, 128)
    starts, seq_lens = np.array([0, 1, 6, 9], np.int32), np.array([40, 60, 33], np.int32)
    (dispatch,) = plan(starts, seq_lens, np.zeros((3, 4), np.int32), shape).dispatches
    assert not dispatch.decode and dispatch.num_tiles == 3  # K/V of a request are read once
