# SPDX-License-Identifier: Apache-2.0
"""Intercepts calls of MLX modules: records them, routes them to a cache, or replaces one.

`mlx.nn.Module` has no hooks: Python looks up ``__call__`` on the class, so that is changed.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.patches.mlx_patches.replacing import replaced
from vllm_metal.patches.vllm_patches.replacing import replace

RELEASES = ("mlx 0.32",)


class CallingCache(ABC):
    """A layer's cache. A module that is called with it returns the result of `call` instead."""

    @abstractmethod
    def call(self, module: MethodType, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Returns the module's result for T rows.

        module: the module's original `__call__`. args, kwargs: its arguments, including this cache.
        """


class SequenceCache(CallingCache):
    """A CallingCache in place of mlx-lm's ArraysCache, which holds recurrent states."""

    # Attributes that mlx-lm's models read for padded batches.
    lengths = None
    left_padding = None

    def make_mask(self, *args: object, **kwargs: object) -> None:
        # No mask: sequences are not padded.
        return None


def ask_caches(cls: type[nn.Module]) -> None:
    """Patches a module class: a `CallingCache` among the arguments handles the call; idempotent."""
    replace(cls, "__call__", _ask_cache)


def _ask_cache(call: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    for argument in _flat((*args, *kwargs.values())):
        if isinstance(argument, CallingCache):
            return argument.call(MethodType(call, self), args, kwargs)
    return call(self, *args, **kwargs)


def _flat(arguments: Iterable[Any]) -> Iterator[Any]:
    """Yields arguments, and what tuples among them hold: the caches of one layer."""
    for argument in arguments:
        yield from argument if isinstance(argument, tuple) else (argument,)


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A running call of a module."""

    module: nn.Module
    args: tuple[Any, ...]
    options: dict[str, Any]  # keyword arguments

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (*self.args, *self.options.values())

    @property
    def caches(self) -> list[Any]:
        """All arguments; where one is a tuple, as caches of one layer are, its content."""
        return list(_flat(self.arguments))


_active_calls: list[ModuleCall] = []


def under_way() -> list[ModuleCall]:
    """Returns running calls, outermost first, within `noted`."""
    return list(_active_calls)


@contextmanager
def noted(model: nn.Module) -> Iterator[None]:
    """Makes `under_way` track the calls of the model's modules within the block."""

    def recording(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            _active_calls.append(ModuleCall(self, args, kwargs))
            try:
                return call(self, *args, **kwargs)
            finally:
                _active_calls.pop()

        return called

    with ExitStack() as stack:
        for cls in {type(module) for module in model.modules()}:
            if call := vars(cls).get("__call__"):
                stack.enter_context(replaced(cls, "__call__", recording(call)))
        yield


def follow_call(
    module: nn.Module,
    then: Callable[[mx.array], mx.array],
    instead: Callable[[], mx.array | None] = lambda: None,
) -> None:
    """Makes one module return `instead()`, or `then(result)` if that is None.

    The module gets a class of its own.
    """
    family = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        if (given := instead()) is not None:
            return given
        return then(family.__call__(self, *args, **kwargs))

    module.__class__ = type(family.__name__, (family,), {"__call__": call})
