# SPDX-License-Identifier: Apache-2.0
"""Calls of MLX's modules: noted, handed to a cache, or followed and replaced in one module.

`mlx.nn.Module` has no hooks: Python looks up ``__call__`` on the class, so it is changed there.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
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
    """Stands where a model expects a layer's cache, and calls the layer's module itself."""

    @abstractmethod
    def call(self, module: MethodType, args: tuple[Any, ...], kwargs: Any) -> Any:
        """What the module makes of T rows.

        Args:
            module: its own call, which takes what the model gave it.
            args, kwargs: the arguments; this cache is one of them.
        """


class SequenceCache(CallingCache):
    """Stands where a model expects mlx-lm's ArraysCache."""

    # What mlx-lm's models look at, of batches that are padded.
    lengths = None
    left_padding = None

    def make_mask(self, *args: object, **kwargs: object) -> None:
        """No mask: sequences are not padded."""
        return None


def ask_caches(cls: type[nn.Module]) -> None:
    """Has calls of such modules ask a `CallingCache` that is among their arguments; idempotent."""
    replace(cls, "__call__", _asking)


def _asking(call: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, CallingCache):
            return argument.call(MethodType(call, self), args, kwargs)
    return call(self, *args, **kwargs)


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A call of a module that is under way."""

    module: nn.Module
    args: tuple[Any, ...]
    options: dict[str, Any]  # arguments by name

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (*self.args, *self.options.values())


_under_way: list[ModuleCall] = []


def under_way() -> list[ModuleCall]:
    """The calls that are under way, outermost first, where they are `noted`."""
    return list(_under_way)


@contextmanager
def noted(model: nn.Module) -> Iterator[None]:
    """Within, `under_way` knows the calls of the model's modules."""

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            _under_way.append(ModuleCall(self, args, kwargs))
            try:
                return call(self, *args, **kwargs)
            finally:
                _under_way.pop()

        return called

    with ExitStack() as stack:
        for cls in {type(module) for module in model.modules()}:
            if call := vars(cls).get("__call__"):
                stack.enter_context(replaced(cls, "__call__", noting(call)))
        yield


def follow_call(
    module: nn.Module,
    then: Callable[[mx.array], mx.array],
    instead: Callable[[], mx.array | None] = lambda: None,
) -> None:
    """Applies `then` to what one module returns, or returns what `instead` has.

    The module gets a class of its own.
    """
    family = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        if (given := instead()) is not None:
            return given
        return then(family.__call__(self, *args, **kwargs))

    module.__class__ = type(family.__name__, (family,), {"__call__": call})
