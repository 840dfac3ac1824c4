# SPDX-License-Identifier: Apache-2.0
"""A change of one of mlx-lm's modules, and the releases it was written for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class ModulePatch:
    """What one module of mlx-lm's lacks to compute what transformers' class does."""

    module: str  # of mlx_lm.models
    releases: tuple[tuple[int, int], ...]  # of mlx-lm, whose source it was written by
    apply: Callable[[ModuleType], None]  # once, when mlx-lm has imported the module


def replace_method(
    cls: type, name: str, replacement: Callable[..., Callable[..., Any]]
) -> Callable[..., Any]:
    """Puts what `replacement` makes of a class's method in its place; returns the method before.

    Args:
        cls: of mlx-lm's.
        name: of the method.
        replacement: takes the method, returns the new one.
    """
    before: Callable[..., Any] = getattr(cls, name)
    setattr(cls, name, functools.wraps(before)(replacement(before)))
    return before
