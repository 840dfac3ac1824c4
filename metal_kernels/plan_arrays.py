# SPDX-License-Identifier: Apache-2.0
"""A step's plan in two parts: the arrays in it, and all else."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import mlx.core as mx

PlanT = TypeVar("PlanT")


def all_else(plan: object, arrays: list[mx.array]) -> Hashable:
    """What plans must have in common for a forward built with one to be one with another's arrays.

    Args:
        plan: dataclasses, tuples and hashable values; fields that are not compared do not count.
        arrays: gets those of the plan, in order.
    """
    if isinstance(plan, mx.array):
        arrays.append(plan)
        return plan.shape, plan.dtype
    if is_dataclass(plan):
        parts = [getattr(plan, field.name) for field in fields(plan) if field.compare]
        return type(plan), *(all_else(part, arrays) for part in parts)
    if isinstance(plan, tuple):
        return tuple(all_else(part, arrays) for part in plan)
    return plan


def with_arrays(plan: PlanT, arrays: Iterator[mx.array]) -> PlanT:
    """The plan with other arrays in the place of its own, taken in order."""
    found: Any = plan
    if isinstance(plan, mx.array):
        found = next(arrays)
    elif is_dataclass(plan) and not isinstance(plan, type):
        compared = [field.name for field in fields(plan) if field.compare]
        found = replace(
            plan, **{name: with_arrays(getattr(plan, name), arrays) for name in compared}
        )
    elif isinstance(plan, tuple):
        found = tuple(with_arrays(part, arrays) for part in plan)
    return found
