# SPDX-License-Identifier: Apache-2.0
"""Covers combinations of settings: few in `make test`, more in CI's second step, all nightly."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

_Row = tuple[int, ...]  # index of a value per axis


def cover(*axes: Sequence[Any], strength: int = 2) -> list[tuple[Any, ...]]:
    """Returns few combinations that cover every pair of values, in the product's order.

    Args:
        axes: values of each axis.
        strength: size of the covered groups of values; 3 covers every triple.
    """
    rows = sorted(_covered([len(axis) for axis in axes], strength))
    return [tuple(axis[at] for axis, at in zip(axes, row, strict=True)) for row in rows]


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by all combinations.

    A cover of all pairs has no marker. Rows that a cover of all triples adds are marked more,
    the rest slow.

    axes: values by parameter name, at least two axes.
    """
    sizes = [len(axis) for axis in axes.values()]
    pairs = _covered(sizes, 2)
    triples = _covered(sizes, 3, begun=pairs)
    return _parametrized(axes, pairs, triples)


def valuewise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by all combinations, for mostly independent axes.

    As many as the longest axis has values have no marker, and contain each value. The
    rest is marked slow.

    Args:
        axes: values by parameter name.
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
    """Extends `begun` rows until each group of values is covered, greedily.

    Each row is the first that covers the most new groups.
    """
    strength = min(strength, len(sizes))
    rows = list(product(*map(range, sizes)))

    def groups(row: _Row) -> set[tuple[tuple[int, int], ...]]:
        return set(combinations(enumerate(row), strength))

    left = set().union(*map(groups, rows))
    chosen = list(begun)
    left.difference_update(*map(groups, chosen))
    # The number of new groups of a row never grows, so an up-to-date maximum is the largest.
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
