# SPDX-License-Identifier: Apache-2.0
"""Separates the arrays of a step's plan from its other fields."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar

import mlx.core as mx

PlanT = TypeVar("PlanT")
_PLAIN = frozenset((int, float, bool, str, type(None)))


def all_else(plan: object, arrays: list[mx.array]) -> Hashable:
    """Appends a plan's arrays to `arrays`; returns everything else of the plan.

    A forward that was built with one plan can use another plan's arrays if both results are equal.
    Plans consist of dataclasses, tuples and hashable values; fields without comparison are ignored.
    """
    kind: Any = type(plan)
    if kind is mx.array:
        found: Any = plan
        arrays.append(found)
        return found.shape, found.dtype
    if (names := _compared(kind)) is not None:
        parts = [getattr(plan, name) for name in names]
    elif isinstance(plan, tuple):
        parts = [*plan]
    else:
        return plan
    # Most parts are plain values; a call for each would double the time.
    for place, part in enumerate(parts):
        if type(part) not in _PLAIN:
            parts[place] = all_else(part, arrays)
    return kind, *parts


def with_arrays(plan: PlanT, arrays: Iterator[mx.array]) -> PlanT:
    """Returns the plan with its arrays replaced by `arrays`, in the order of `all_else`."""
    found: Any = plan
    kind: Any = type(plan)
    if isinstance(plan, mx.array):
        found = next(arrays)
    elif (names := _compared(kind)) is not None:
        found = replace(found, **{name: with_arrays(getattr(plan, name), arrays) for name in names})
    elif isinstance(plan, tuple):
        found = tuple(with_arrays(part, arrays) for part in plan)
    return found


@cache  # every step walks through its plans
def _compared(kind: type) -> tuple[str, ...] | None:
    """Names of a dataclass's fields that are compared; None for other types."""
    if not is_dataclass(kind):
        return None
    return tuple(field.name for field in fields(kind) if field.compare)
