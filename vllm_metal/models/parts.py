# SPDX-License-Identifier: Apache-2.0
"""A loaded model taken apart: its embedding, the hidden states on the way, and its head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn


class SelectedRows:
    """Lets only chosen rows of the hidden states reach the model's head, at once or later."""

    def __init__(self, model: nn.Module) -> None:
        self._rows: mx.array | None = None
        self._hidden: mx.array | None = None  # what `_select` saw last
        self._instead: mx.array | None = None  # stands in for what the decoder would compute
        self._observer: Callable[[mx.array], None] | None = None
        self._decoder = _decoder(model)
        if self._decoder is not None:
            _wrap_call(self._decoder, self._select, lambda: self._instead)

    def observe(self, observer: Callable[[mx.array], None]) -> None:
        """Shows `observer` the hidden states of all rows, [T, 1, H], before any are left out.

        Raises:
            NotImplementedError: the model does not keep its head apart.
        """
        if self._decoder is None:
            raise NotImplementedError("the target's hidden states cannot be told from its head")
        self._observer = observer

    def _select(self, hidden: mx.array) -> mx.array:
        if self._observer is not None:
            self._observer(hidden)
        self._hidden = hidden
        return hidden if self._rows is None else hidden[self._rows]

    def logits(
        self, model: nn.Module, input_ids: mx.array, caches: list[Any], rows: mx.array | None
    ) -> mx.array:
        """Runs the model over T rows of length 1.

        Args:
            model: the one this was made for.
            input_ids: [T] int32.
            caches: one a layer, already told of the step.
            rows: [N] int32, rows whose logits are wanted; None for all T.

        Returns:
            [N, V] logits.
        """
        self._rows = rows
        try:
            out = model(input_ids[:, None], cache=caches)[:, 0]
        finally:  # a step that fails must leave nothing for the next one
            self._rows = self._hidden = None
        return out if self._decoder is not None or rows is None else out[rows]

    def states(self, model: nn.Module, input_ids: mx.array, caches: list[Any]) -> mx.array:
        """Runs the model over T rows of length 1, all but its head.

        Args:
            model, input_ids, caches: see `logits`.

        Returns:
            [T, 1, H], for `head`; where the model does not keep its head apart, the logits.
        """
        out = model(input_ids[:, None], cache=caches)  # of which the head is never computed
        hidden, self._hidden = self._hidden, None
        return out if hidden is None else hidden

    def head(self, model: nn.Module, states: mx.array) -> mx.array:
        """[N, V] logits of `states`, rows of what `states` gave."""
        if self._decoder is None:
            return states[:, 0]
        self._instead = states
        try:
            # The model's own path from there on: with whatever it does to logits after its head.
            return model(mx.zeros(states.shape[:2], mx.int32))[:, 0]
        finally:  # see `logits`
            self._instead = None


def _decoder(model: nn.Module) -> nn.Module | None:
    """The module that holds the layers and returns hidden states; None where that is the model."""
    layers = [id(layer) for layer in model.layers]  # some families give a copy of the list
    for _, module in model.named_modules():
        if module is model or not isinstance(found := module.get("layers"), list):
            continue
        if [id(layer) for layer in found] == layers:
            return module
    return None


def _wrap_call(
    module: nn.Module,
    then: Callable[[mx.array], mx.array],
    instead: Callable[[], mx.array | None] = lambda: None,
) -> None:
    """Applies `then` to what the module returns, or returns what `instead` has.

    Python looks up ``__call__`` on the class, so the module gets one of its own.
    """
    family = type(module)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
        if (given := instead()) is not None:
            return given
        return then(family.__call__(self, *args, **kwargs))

    module.__class__ = type(family.__name__, (family,), {"__call__": call})


class HiddenStates:
    """What a model computes on the way to its logits, for heads that draft from it."""

    def __init__(
        self, model: nn.Module, selected: SelectedRows, layer_ids: Sequence[int] | None = None
    ) -> None:
        """
        Args:
            model: the target.
            selected: its row selection.
            layer_ids: L stands for what the L-th layer passes on, from 1; None: the final states,
                after the model's last norm.

        Raises:
            NotImplementedError: the model has no such layer, or does not show its states.
        """
        self._layer_ids = layer_ids
        self._newest: dict[int, mx.array] = {}
        if layer_ids is None:
            selected.observe(partial(self._newest.__setitem__, 0))
            return
        layers = model.layers
        for layer_id in layer_ids:
            if not 1 <= layer_id <= len(layers):
                raise NotImplementedError(
                    f"the draft head wants the states after layer {layer_id} of a model that has "
                    f"{len(layers)} (eagle_aux_hidden_state_layer_ids)"
                )
            _wrap_call(layers[layer_id - 1], partial(self._note, layer_id))

    def _note(self, layer_id: int, hidden: mx.array) -> mx.array:
        self._newest[layer_id] = hidden
        return hidden

    def take(self) -> mx.array:
        """[T, H], or [T, H * len(layer_ids)], of the forward built last; lazy."""
        order = [0] if self._layer_ids is None else self._layer_ids
        states = [self._newest[layer_id][:, 0] for layer_id in order]
        self._newest.clear()
        return states[0] if len(states) == 1 else mx.concatenate(states, axis=-1)


def input_embedding(model: nn.Module) -> nn.Module:
    """The model's embedding of tokens.

    Raises:
        NotImplementedError: it is not where mlx-lm's families keep it.
    """
    decoder = _decoder(model) or model
    for name in ("embed_tokens", "wte", "embedding"):
        if isinstance(module := decoder.get(name), nn.Module):
            return module
    raise NotImplementedError("the target's token embedding cannot be found for its draft head")


def output_head(model: nn.Module) -> Callable[[mx.array], mx.array]:
    """From final hidden states to logits, up to a scale."""
    for name, module in model.named_modules():
        if name.split(".")[-1] == "lm_head":
            return cast(Callable[[mx.array], mx.array], module)
    return cast(Callable[[mx.array], mx.array], input_embedding(model).as_linear)
