# SPDX-License-Identifier: Apache-2.0
"""How modules of this package put functions of ours in the place of vLLM's: each of them once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

#: Of what is there: our functions by name, each in a list of one, the innermost first.
_OURS = "_vllm_metal_ours"


def replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Puts `ours` in the place of `owner.name`, once.

    Another function of ours goes around the first. Functions are told apart by their names: one
    that is made anew by each call takes the place of the one before, so that the settings that it
    closes over are those of the engine that started last.

    The mark is our own: `__wrapped__` is also set by decorators of vLLM's.

    Args:
        owner: a module of vLLM's, or a class.
        name: of a function of the module, or of a method that takes `self` or is static.
        ours: is called with the function as vLLM has it, then with the arguments of the call. What
            stands there has the original's name, docstring and signature.

    Raises:
        TypeError: `owner.name` is no plain function: a class method, say, or a property.
    """
    found = inspect.getattr_static(owner, name)
    static = isinstance(found, staticmethod)
    original = found.__func__ if static else found
    if not isinstance(original, FunctionType):
        raise TypeError(f"{name} of {owner} is a {type(original).__name__} and no function")
    before: dict[str, list[Callable[..., Any]]] = getattr(original, _OURS, {})
    if (mark := f"{ours.__module__}.{ours.__qualname__}") in before:
        before[mark][0] = ours
        return
    newest = [ours]

    @functools.wraps(original)
    def replacement(*args: Any, **options: Any) -> Any:
        return newest[0](original, *args, **options)

    setattr(replacement, _OURS, before | {mark: newest})
    setattr(owner, name, staticmethod(replacement) if static else replacement)
