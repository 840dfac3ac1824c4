# SPDX-License-Identifier: Apache-2.0
"""A cover has every pair, and few combinations; what it leaves out runs at night."""

from itertools import combinations, product

import pytest
from pairs import cover, pairwise


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ((2, 2), 4),
        ((3, 5), 15),
        ((2, 2, 2), 5),
        ((7, 3, 3, 2), 24),
        ((4, 4, 4, 4), 24),
        ((1, 6), 6),
    ],
)
def test_every_pair_is_in_few_of_the_combinations(sizes, most):
    axes = ["abcdefgh"[place] * size for place, size in enumerate(sizes)]
    axes = [[f"{name}{number}" for number, name in enumerate(axis)] for axis in axes]
    found = cover(*axes)
    assert found == [row for row in product(*axes) if row in found]
    for (first, ones), (second, others) in combinations(enumerate(axes), 2):
        assert {(row[first], row[second]) for row in found} == set(product(ones, others))
    assert len(found) <= most


def test_no_combination_is_lost():
    axes = {"size": [64, 80, 96], "dtype": ["f16", "f32"], "kind": [None, {}]}
    mark = pairwise(**axes)
    names, combined = mark.args
    assert names == tuple(axes)
    assert [each.values for each in combined] == list(product(*axes.values()))
    by_day = [each.values for each in combined if not each.marks]
    assert by_day == cover(*axes.values()) and len(by_day) < len(combined)
    assert {mark.name for each in combined for mark in each.marks} == {"slow"}
