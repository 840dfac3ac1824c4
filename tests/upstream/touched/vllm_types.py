# SPDX-License-Identifier: Apache-2.0
"""Types of what vLLM's classes declare, set and return, as far as its annotations tell."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def alternatives(kind: Any) -> Iterator[Any]:
    """The types of a union, or the type itself."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        for part in typing.get_args(kind):
            yield from alternatives(part)
    elif origin in (typing.Annotated, typing.ClassVar):
        yield from alternatives(typing.get_args(kind)[0])
    elif kind is not None:
        yield kind


def element(kind: Any) -> Any:
    """The type of what a loop over an object gets, or None."""
    for part in alternatives(kind):
        args = typing.get_args(part)
        if args and typing.get_origin(part) is not Callable:
            return args[0]
    return None


def item(kind: Any) -> Any:
    """The type of `object[...]`, or None."""
    for part in alternatives(kind):
        if _is_mapping(part):
            return typing.get_args(part)[1]
    return element(kind)


def items(kind: Any) -> Any:
    """The type of a mapping's pairs, as `tuple[key, value]`, or None."""
    for part in alternatives(kind):
        if _is_mapping(part):
            return tuple[typing.get_args(part)]
    return None


def _is_mapping(kind: Any) -> bool:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    return isinstance(origin, type) and issubclass(origin, Mapping) and len(args) == 2


def returned(function: Any) -> Any:
    """What a function of vLLM's returns, or None."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    annotation = getattr(function, "__annotations__", {}).get("return")
    return _evaluated(annotation, getattr(function, "__module__", ""))


def of_attribute(cls: type, name: str) -> Any:
    """What an attribute of a class's objects is, or None."""
    for base in cls.__mro__:
        if name in (declared := vars(base).get("__annotations__", {})):
            return _evaluated(declared[name], base.__module__)
        found = vars(base).get(name)
        if isinstance(found, property | functools.cached_property):
            return returned(found.fget if isinstance(found, property) else found.func)
        if name in (set_here := _set_in_init(base)):
            return set_here[name]
    return None


def _evaluated(annotation: Any, module: str) -> Any:
    """An annotation as a type, or None where its names are there for type checkers only."""
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, dict(vars(sys.modules[module])))
    except Exception:
        return None


@functools.cache
def _set_in_init(cls: type) -> dict[str, Any]:
    """Types of the attributes that a class's `__init__` sets, as far as its source shows them."""
    init = inspect.unwrap(vars(cls).get("__init__", None))
    if not cls.__module__.startswith("vllm") or not isinstance(init, types.FunctionType):
        return {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(init)))
    except OSError:  # a dataclass makes its own
        return {}
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            target, kind = node.target, _evaluated(ast.unparse(node.annotation), cls.__module__)
        elif isinstance(node, ast.Assign):
            target, kind = node.targets[0], _made(node.value, init, found)
        else:
            continue
        if isinstance(target, ast.Attribute) and kind is not None:
            found[target.attr] = kind
    return found


def _made(value: ast.expr, init: types.FunctionType, found: dict[str, Any]) -> Any:
    """The type of a parameter, of an attribute, or of what a function or class is called for."""
    if isinstance(value, ast.Name):
        return _evaluated(init.__annotations__.get(value.id), init.__module__)
    if isinstance(value, ast.Attribute):
        if ast.unparse(value.value) == "self":
            return found.get(value.attr)
        owners = alternatives(_made(value.value, init, found))
        kinds = (of_attribute(cls, value.attr) for cls in owners if isinstance(cls, type))
        return next(kinds, None)
    if not isinstance(value, ast.Call):
        return None
    function = _evaluated(ast.unparse(value.func), init.__module__)
    return function if isinstance(function, type) else returned(function)
