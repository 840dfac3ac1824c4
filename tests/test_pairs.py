# SPDX-License-Identifier: Apache-2.0
"""Covers contain every pair or triple in few combinations; the rest runs later."""

from itertools import combinations, product

import pytest
from pairs import cover, pairwise, valuewise


def axes_of(sizes):
    axes = ["abcdefgh"[place] * size for place, size in enumerate(sizes)]
    return [[f"{name}{number}" for number, name in enumerate(axis)] for axis in axes]


@pytest.mark.parametrize(
    ("sizes", "strength", "most"),
    [
        ((2, 2), 2, 4),
        ((3, 5), 2, 15),
        ((2, 2, 2), 2, 5),
        ((7, 3, 3, 2), 2, 24),
        ((4, 4, 4, 4), 2, 24),
        ((10, 3, 3, 3, 3), 2, 36),
        ((1, 6), 2, 6),
        ((3, 5), 3, 15),
        ((2, 2, 2), 3, 8),
        ((10, 3, 3, 3, 3), 3, 125),
    ],
)
def test_every_group_is_in_few_of_the_combinations(sizes, strength, most):
    axes = axes_of(sizes)
    found = cover(*axes, strength=strength)
    assert found == [row for row in product(*axes) if row in found]
    for places in combinations(range(len(axes)), min(strength, len(axes))):
        seen = {tuple(row[place] for place in places) for row in found}
        assert seen == set(product(*(axes[place] for place in places)))
    assert len(found) <= most


AXES = {"size": [64, 80, 96], "dtype": ["f16", "f32"], "kind": [None, {}], "long": [0, 1]}


def by_marker(decorator):
    """Returns combinations by marker, "" for none."""
    names, combined = decorator.args
    assert names == tuple(AXES)
    assert [each.values for each in combined] == list(product(*AXES.values()))
    found = {"": [], "more": [], "slow": []}
    for each in combined:
        found["".join(mark.name for mark in each.marks)].append(each.values)
    return found


def test_pairs_run_by_day_triples_in_ci_and_the_rest_at_night():
    found = by_marker(pairwise(**AXES))
    assert found[""] == cover(*AXES.values())
    both = found[""] + found["more"]
    for places in combinations(range(len(AXES)), 3):
        axes = [list(AXES.values())[place] for place in places]
        assert all(
            any([row[place] for place in places] == list(group) for row in both)
            for group in product(*axes)
        )
    assert found["more"] and found["slow"]


def test_each_value_runs_by_day_and_the_rest_at_night():
    found = by_marker(valuewise(**AXES))
    assert found[""] == [(64, "f16", None, 0), (80, "f32", {}, 1), (96, "f16", None, 0)]
    assert not found["more"]
