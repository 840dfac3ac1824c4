# SPDX-License-Identifier: Apache-2.0
"""Calls of mlx-lm's recurrent and convolution modules, given sequences in place of single rows.

Such a module goes from token to token. The model gets T rows of length 1, so the call is taken
apart: the module is called once for each run of sequences (`RecurrentPlan`), with the states
before them in mlx-lm's own cache, and its results are put back in the order of the rows.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten

_ORIGINAL = "_vllm_metal_original"  # attribute of a replaced __call__


class SequenceCache(ABC):
    """Stands where a model expects mlx-lm's ArraysCache, and calls the layer's module itself."""

    # What mlx-lm's models look at, of batches that are padded.
    lengths = None
    left_padding = None

    def make_mask(self, *args: object, **kwargs: object) -> None:
        """No mask: sequences are not padded."""
        return None

    @abstractmethod
    def call(self, module: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """What the module makes of T rows.

        Args:
            module: takes what the model gave it.
            args, kwargs: the arguments; this cache is one of them.
        """


def sequences_of(tree: Any, rows: mx.array, num_rows: int) -> Any:
    """Arguments with [n, L, ...] sequences in place of each array of [T, 1, ...] rows.

    [T] integers are the rows' positions: of a sequence, its first one's is told.

    Args:
        tree: arguments.
        rows: [n, L] int32.
        num_rows: T.
    """

    def regrouped(leaf: Any) -> Any:
        if isinstance(leaf, mx.array) and leaf.shape[:2] == (num_rows, 1):
            return leaf[:, 0][rows]
        if isinstance(leaf, mx.array) and leaf.shape == (num_rows,) and leaf.dtype == mx.int32:
            return leaf[rows[:, 0]]
        return leaf

    return tree_map(regrouped, tree)


def results_of(tree: Any) -> tuple[list[mx.array], Callable[[Sequence[mx.array]], Any]]:
    """A module's results as a list of arrays, and what makes such a result of others."""
    if isinstance(tree, mx.array):
        return [tree], lambda arrays: arrays[0]
    named = cast(list[tuple[str, mx.array]], tree_flatten(tree))
    names = [name for name, _ in named]

    def rebuilt(arrays: Sequence[mx.array]) -> Any:
        found = tree_unflatten(list(zip(names, arrays, strict=True)))
        return type(tree)(found)

    return [array for _, array in named], rebuilt


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a module that is under way."""

    module: nn.Module
    arguments: tuple[Any, ...]


_under_way: list[Call] = []


def under_way() -> list[Call]:
    """The calls that are under way, outermost first, where they are `noted`."""
    return list(_under_way)


@contextmanager
def noted(model: nn.Module) -> Iterator[None]:
    """Within, `under_way` knows the calls of the model's modules."""
    classes = {type(module) for module in model.modules()}
    before = {cls: vars(cls)["__call__"] for cls in classes if "__call__" in vars(cls)}

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            _under_way.append(Call(self, (*args, *kwargs.values())))
            try:
                return call(self, *args, **kwargs)
            finally:
                _under_way.pop()

        return called

    for cls, call in before.items():
        setattr(cls, "__call__", noting(call))  # noqa: B010
    try:
        yield
    finally:
        for cls, call in before.items():
            setattr(cls, "__call__", call)  # noqa: B010


def install(cls: type[nn.Module]) -> None:
    """Has calls of such modules ask a `SequenceCache` that is among their arguments; idempotent."""
    original = cls.__call__
    if hasattr(original, _ORIGINAL):
        return

    @functools.wraps(original)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, SequenceCache):
                return argument.call(functools.partial(original, self), args, kwargs)
        return original(self, *args, **kwargs)

    setattr(called, _ORIGINAL, original)
    setattr(cls, "__call__", called)  # noqa: B010
