# SPDX-License-Identifier: Apache-2.0
"""Replaces functions of vLLM by ours, each only once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

#: Attribute of a replacement: our functions by name, each in a list of one, innermost first.
_OURS = "_vllm_metal_ours"


def replace(owner: Any, name: str, ours: Callable[..., Any]) -> None:
    """Replaces `owner.name` by a function that calls `ours`, once.

    A later call with another function wraps the first one. A function of the same name replaces its
    predecessor: if each engine makes one, the closure's settings are those of the newest engine.

    Args:
        owner: a module or class of vLLM.
        name: a function of the module, or a method that takes `self` or is static.
        ours: takes vLLM's function and the arguments of the call. The replacement has the original
            name, docstring and signature.

    Raises:
        TypeError: `owner.name` is not a plain function, but a class method or a property.
    """
    # The mark is our own because vLLM's decorators set `__wrapped__`, too.
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
