# SPDX-License-Identifier: Apache-2.0
"""Matrices of settings: a few combinations by day, more in CI's second step, all at night."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

_Row = tuple[int, ...]  # of each axis the index of a value


def cover(*axes: Sequence[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Few combinations of one value of each axis, in the product's order, with every pair.

    Args:
        axes: values, any two of which stand together in one of the combinations.
        strength: how many values of as many axes stand together; 3: every triple does.
    """
    rows = sorted(_covered([len(axis) for axis in axes], strength))
    return [tuple(axis[at] for axis, at in zip(axes, row, strict=True)) for row in rows]


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by all combinations.

    A cover of all pairs has no marker. What it lacks of a cover of all triples is marked more, the
    rest slow.

    Args:
        axes: values by a parameter's name, two axes at least.
    """
    sizes = [len(axis) for axis in axes.values()]
    pairs = _covered(sizes, 2)
    triples = _covered(sizes, 3, begun=pairs)
    return _parametrized(axes, pairs, triples)


def valuewise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by all combinations, for axes that hardly depend on each other.

    As many as the longest axis has values are without a marker: each value is in one at least. The
    rest is marked slow.

    Args:
        axes: values by a parameter's name.
    """
    sizes = [len(axis) for axis in axes.values()]
    return _parametrized(axes, [tuple(i % size for size in sizes) for i in range(max(sizes))])


def _parametrized(
    axes: dict[str, Sequence[Any]], by_day: Iterable[_Row], more: Iterable[_Row] = ()
) -> pytest.MarkDecorator:
    marks: dict[_Row, Any] = dict.fromkeys(more, pytest.mark.more) | dict.fromkeys(by_day, ())
    combined = [
        pytest.param(
            *(axis[at] for axis, at in zip(axes.values(), row, strict=True)),
            marks=marks.get(row, pytest.mark.slow),
        )
        for row in product(*(range(len(axis)) for axis in axes.values()))
    ]
    return pytest.mark.parametrize(tuple(axes), combined)


def _covered(sizes: Sequence[int], strength: int, begun: Iterable[_Row] = ()) -> list[_Row]:
    """Rows that go on from those begun until each group of values is in one; greedy.

    Each row is one that has most groups which none before it has, the first of those.
    """
    strength = min(strength, len(sizes))
    rows = list(product(*map(range, sizes)))

    def groups(row: _Row) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(row), strength))

    left = set().union(*map(groups, rows))
    chosen = list(begun)
    left.difference_update(*map(groups, chosen))
    # How many groups a row adds never grows: a number that is still right is the largest.
    queue = [(-len(groups(row) & left), row) for row in rows]
    heapq.heapify(queue)
    while left:
        noted, row = heapq.heappop(queue)
        added = groups(row) & left
        if -noted == len(added):
            chosen.append(row)
            left -= added
        else:
            heapq.heappush(queue, (-len(added), row))
    return chosen
