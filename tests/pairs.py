# SPDX-License-Identifier: Apache-2.0
"""Every pair of settings by day, every combination at night."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def cover(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of one value of each axis, in the product's order: few, with every pair.

    Any two values of two axes stand together in one of them. Greedy: each is one that has most
    pairs which none before it has, the first of those.
    """
    rows = list(product(*(range(len(axis)) for axis in axes)))
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    left = set().union(*pairs.values())
    chosen = []
    while left:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & left)))
        left -= pairs[chosen[-1]]
    return [
        tuple(axis[place] for axis, place in zip(axes, row, strict=True)) for row in sorted(chosen)
    ]


def pairwise(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrizes a test by all combinations: those outside the cover are marked slow.

    Args:
        axes: values by a parameter's name, two axes at least.
    """
    by_day = set(cover(*(range(len(axis)) for axis in axes.values())))
    combined = [
        pytest.param(
            *(axis[place] for axis, place in zip(axes.values(), row, strict=True)),
            marks=() if row in by_day else pytest.mark.slow,
        )
        for row in product(*(range(len(axis)) for axis in axes.values()))
    ]
    return pytest.mark.parametrize(tuple(axes), combined)
