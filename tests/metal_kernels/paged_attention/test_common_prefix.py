# SPDX-License-Identifier: Apache-2.0
"""Grouping of requests that share their first blocks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from metal_kernels.paged_attention.common_prefix import common_prefixes

row = st.lists(st.integers(0, 2), min_size=5, max_size=5)


def groups(tables, usable):
    of_request, lengths = common_prefixes(np.array(tables, np.int32), np.array(usable, np.int32))
    assert set(of_request) - {-1} == set(range(len(lengths)))
    return [
        (np.flatnonzero(of_request == group).tolist(), length)
        for group, length in enumerate(lengths.tolist())
    ]


@given(tables=st.lists(row, min_size=1, max_size=8), data=st.data())
def test_the_members_of_a_group_begin_alike_and_are_in_no_other(tables, data):
    lengths = st.lists(st.integers(0, 5), min_size=len(tables), max_size=len(tables))
    usable = data.draw(lengths)
    found = groups(tables, usable)
    for members, length in found:
        assert len(members) > 1 and length > 0
        assert members == sorted(members)
        assert len({tuple(tables[member][:length]) for member in members}) == 1
        assert all(usable[member] >= length for member in members)
    grouped = [member for members, _ in found for member in members]
    assert len(grouped) == len(set(grouped))
    # Those left over share no first block.
    firsts = [tables[i][0] for i in range(len(tables)) if i not in grouped and usable[i]]
    assert len(firsts) == len(set(firsts))


def test_a_short_request_does_not_shorten_what_many_others_share():
    tables = [[7, 1, 2, 3, 4], [7, 1, 2, 3, 5], [7, 8, 8, 8, 8], [7, 1, 2, 3, 6], [9, 1, 2, 3, 4]]
    assert groups(tables, [5, 5, 1, 5, 5]) == [([0, 1, 3], 4)]


def test_requests_that_begin_alike_and_go_on_in_two_ways_are_two_groups():
    tables = [[7, 1, 1, 1], [7, 2, 2, 3], [7, 1, 1, 4], [7, 2, 2, 5]]
    assert groups(tables, [4, 4, 4, 4]) == [([0, 2], 3), ([1, 3], 3)]


def test_a_table_of_one_prompt_is_one_group_as_long_as_all_may_use():
    assert groups([[3, 4, 5]] * 3, [3, 3, 3]) == [([0, 1, 2], 3)]
    assert groups([[3, 4, 5]] * 3, [0, 0, 3]) == []
