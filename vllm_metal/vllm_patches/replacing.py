# SPDX-License-Identifier: Apache-2.0
"""How modules of this package put functions of ours in the place of vLLM's: each of them once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

_MAKERS = "_vllm_metal_makers"  # of what is there: the names of what made it, one around the other


def replace(owner: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Puts `make(original)` in the place of `owner.name`; changes nothing the second time.

    Another `make` goes around what the first has put there.

    The mark is our own: `__wrapped__` is also set by decorators of vLLM's.

    Args:
        owner: a module of vLLM's, or a class.
        name: of a function of the module, or of a method that takes `self`.
        make: is given the function as vLLM has it, and returns the one to call instead, which gets
            the original's name, docstring and signature.

    Raises:
        TypeError: `owner.name` is no plain function: a class method, say, or a property.
    """
    original = inspect.getattr_static(owner, name)
    if not isinstance(original, FunctionType):
        raise TypeError(f"{name} of {owner} is a {type(original).__name__} and no function")
    makers: frozenset[str] = getattr(original, _MAKERS, frozenset())
    maker = f"{make.__module__}.{make.__qualname__}"
    if maker in makers:
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _MAKERS, makers | {maker})
    setattr(owner, name, replacement)
