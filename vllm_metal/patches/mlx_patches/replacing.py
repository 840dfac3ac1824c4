# SPDX-License-Identifier: Apache-2.0
"""Puts functions of ours in the place of MLX's and mlx-lm's, for good or for a while."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Gives an attribute another value, until the end of the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def wrap(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Puts `make(before)` in the place of a function; each call wraps it once more.

    Args:
        owner: a module, or a class.
        name: of the function or method.
        make: takes the function, returns the new one.
    """
    before = getattr(owner, name)
    setattr(owner, name, functools.wraps(before)(make(before)))


def after_init(cls: Any, then: Callable[..., None]) -> None:
    """Has `then` follow the `__init__` of a class, with its arguments."""

    def following(before: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **options: Any) -> None:
            before(self, *args, **options)
            then(self, *args, **options)

        return init

    wrap(cls, "__init__", following)


def spread(name: str, before: Callable[..., Any], after: Callable[..., Any]) -> None:
    """Replaces a function in each of mlx-lm's modules that has imported it by now; idempotent.

    Args:
        name: that the modules know it by.
        before: as mlx-lm has it.
        after: the one to call instead.
    """
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("mlx_lm.models.") and getattr(module, name, None) is before:
            setattr(module, name, after)
