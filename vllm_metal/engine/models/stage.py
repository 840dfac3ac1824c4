# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: one rank's layers of a model that keeps its structure and names.

Layers of other ranks stay in place, without weights: mlx-lm's models choose masks, ropes and kinds
by a layer's index. Those before the rank's own pass their input on, except that the last of them
returns the hidden states received from the previous rank. The first one after ends the call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from vllm_metal.engine.attention.forward_inputs import optional_of_rows
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.engine.models import headless
from vllm_metal.engine.models.embedding import embedding_of

#: Key in `ForwardInputs.extras`: [T, ...] hidden states from the previous rank.
HIDDEN = "hidden"


class HiddenReturned(Exception):
    """Ends a call of a model, and carries the hidden states computed so far."""

    def __init__(self, hidden_states: mx.array) -> None:
        super().__init__()
        self.hidden_states = hidden_states


@dataclass(frozen=True)
class Stage:
    """Layers from `start` up to, but not including, `end`."""

    start: int
    end: int
    num_layers: int

    @staticmethod
    def of(num_layers: int, rank: int, size: int) -> Stage:
        """Returns the stage that vLLM assigns to a rank; raises ValueError for too many ranks."""
        from vllm.distributed.utils import get_pp_indices

        if num_layers < size:
            raise ValueError(
                f"--pipeline-parallel-size={size} exceeds the {num_layers} layers of the "
                f"model: choose {num_layers} or less"
            )
        return Stage(*get_pp_indices(num_layers, rank, size), num_layers)

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.end == self.num_layers

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last

    def has(self, index: int) -> bool:
        return self.start <= index < self.end

    def own(self, layers: Sequence[StatefulLayer]) -> list[StatefulLayer]:
        """Returns the layers that the rank computes, out of all of a model's."""
        return [layer for layer in layers if self.has(_index(layer))]

    def caches(self, caches: Sequence[Any], layers: Sequence[StatefulLayer]) -> list[Any]:
        """Returns a cache for each of the model's layers, as its call expects them.

        `caches` are of the rank's own layers, `layers` all of the model's, one per cache.
        """
        # A model may make a mask from the cache of another rank's layer, or read its positions: a
        # cache of the same kind replaces it, if this rank has one.
        of_kind: dict[Hashable, Any] = {}
        for cache, layer in zip(caches, self.own(_first_of_each(layers)), strict=True):
            of_kind.setdefault(layer.kind, cache)
        given = iter(caches)
        return [
            next(given) if self.has(_index(layer)) else of_kind.get(layer.kind)
            for layer in _first_of_each(layers)
        ]

    def keep(self, model: nn.Module) -> None:
        """Removes the weights of other ranks' layers, embedding and head, before they are read."""
        layers = model.layers
        own = {id(module) for layer in layers[self.start : self.end] for module in layer.modules()}
        for index, layer in enumerate(layers):
            if self.has(index):
                continue
            _remove_arrays(layer, own)
            _replace_call(layer, self._replacement(index))
        tied = headless.head_path(model) is None
        if not self.is_last:
            headless.drop_head(model)
        # A tied embedding is also the last rank's head.
        if not self.is_first and not (self.is_last and tied):
            _drop_embedding(model)

    def _replacement(self, index: int) -> Callable[..., mx.array]:
        if index >= self.end:
            return _end
        return _receive if index == self.start - 1 else _pass_on


def check_stages(model: nn.Module, layers: Sequence[StatefulLayer]) -> None:
    """Raises NotImplementedError if layers need more than the previous layer's output.

    These are layers without a cache of their own, and modules that are used as several layers.
    """
    if len(_first_of_each(layers)) != len(model.layers):
        raise NotImplementedError("has layers without a cache of their own")
    if len({id(layer) for layer in model.layers}) != len(model.layers):
        raise NotImplementedError("has one module as several layers")


def _pass_on(self: nn.Module, hidden_states: mx.array, *args: Any, **kwargs: Any) -> mx.array:
    return hidden_states


def _receive(self: nn.Module, hidden_states: mx.array, *args: Any, **kwargs: Any) -> mx.array:
    received = optional_of_rows(HIDDEN)
    return hidden_states if received is None else received


def _end(self: nn.Module, hidden_states: mx.array, *args: Any, **kwargs: Any) -> mx.array:
    raise HiddenReturned(hidden_states)


def _remove_arrays(layer: nn.Module, kept: Collection[int]) -> None:
    # Removes the arrays of another rank's layer, but keeps what models read to tell its kind, and
    # modules that the rank's own layers share, such as ropes.
    for module in (each for each in layer.modules() if id(each) not in kept):
        for name in [name for name, value in module.items() if _holds_arrays(value)]:
            del module[name]


def _holds_arrays(value: Any) -> bool:
    # An array, a module that computes with its own, or a collection of these.
    if isinstance(value, mx.array):
        return True
    if isinstance(value, nn.Module):
        return bool(value.parameters()) and not value.children()
    if not isinstance(value, (list, dict)):
        return False
    leaves: list[Any] = []
    tree_map(leaves.append, value, is_leaf=lambda each: isinstance(each, nn.Module))
    return bool(leaves) and all(_holds_arrays(each) for each in leaves)


def _replace_call(module: nn.Module, call: Callable[..., mx.array]) -> None:
    # Python looks `__call__` up on the class, so this module gets a class of its own.
    family = type(module)
    module.__class__ = type(family.__name__, (family,), {"__call__": call})


class _NoEmbedding(nn.Module):
    """Replaces an embedding that no layer reads; only its result's shape and dtype count."""

    def __init__(self, given: mx.array) -> None:
        super().__init__()
        self._width, self._dtype = given.shape[-1], given.dtype

    def __call__(self, input_ids: mx.array) -> mx.array:
        return mx.zeros((*input_ids.shape, self._width), self._dtype)

    def as_linear(self, hidden_states: mx.array) -> mx.array:
        return hidden_states


def _drop_embedding(model: nn.Module) -> None:
    found = embedding_of(model)
    if found is not None:
        owner, name = found
        setattr(owner, name, _NoEmbedding(owner[name](mx.zeros((1, 1), mx.int32))))


def _index(layer: StatefulLayer) -> int:
    return int(layer.place.rpartition("layers.")[2])


def _first_of_each(layers: Sequence[StatefulLayer]) -> list[StatefulLayer]:
    # A layer may have several caches: the first one counts.
    return list({layer.place: layer for layer in reversed(layers)}.values())[::-1]
