# SPDX-License-Identifier: Apache-2.0
"""A loaded model's forward in parts that are called apart: embedding, hidden states, logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal.engine.attention.forward_inputs import ForwardInputs, bound
from vllm_metal.engine.models.embedding import decoder_of, embedding_of
from vllm_metal.engine.models.stage import HiddenReturned
from vllm_metal.patches.mlx_patches.module_calls import follow_call


@dataclass
class _Call:
    """What one call of the model is given in place of its own parts, and what it shows."""

    embeddings: mx.array | None = None  # in place of what the embedding would compute
    hidden_states: mx.array | None = None  # in place of what the decoder would compute
    stops: bool = False  # the call ends once the decoder has returned


class ModelParts:
    """A model whose forward can be stopped before its head, and started behind its embedding.

    mlx-lm's families compute logits in one call. The decoder and the embedding get a class of their
    own here, so that a call of the model can be given their results instead of computing them.
    """

    def __init__(
        self, model: nn.Module, all_caches: Callable[[list[Any]], list[Any]] = lambda caches: caches
    ) -> None:
        """
        Args:
            model: an mlx-lm model, loaded.
            all_caches: from those of its own layers to those that its call wants, see Stage.
        """
        self.model = model
        self._all_caches = all_caches
        self._call = _Call()
        self._observer: Callable[[mx.array], object] | None = None
        #: Who is shown hidden states of every forward.
        self.observers: list[HiddenStates] = []
        self._write_context: Callable[[list[Any]], None] | None = None
        self._num_context_layers = 0
        self._decoder = decoder_of(model)
        if self._decoder is not None:
            follow_call(self._decoder, self._show, lambda: self._call.hidden_states)
        place = embedding_of(model)
        self._embedding: nn.Module | None = None if place is None else place[0][place[1]]
        if self._embedding is not None:
            follow_call(self._embedding, lambda out: out, lambda: self._call.embeddings)

    def embed(self, input_ids: mx.array) -> mx.array:
        """[T, 1, H] embeddings of [T] int32 tokens, for `forward_hidden`.

        Raises:
            NotImplementedError: the embedding is not where mlx-lm's families keep it.
        """
        return cast(mx.array, self.input_embedding(input_ids[:, None]))

    def write_context(self, write: Callable[[list[Any]], None], num_layers: int) -> None:
        """Has every forward end with `write`, which keeps K/V of a draft network's layers.

        Args:
            write: given the layers' caches.
            num_layers: of the network; `forward_hidden` takes their caches behind the model's.
        """
        self._write_context, self._num_context_layers = write, num_layers

    def forward_hidden(self, inputs: ForwardInputs, caches: list[Any]) -> mx.array:
        """Runs the model over T rows of length 1, all but its head.

        Args:
            inputs: of the rows.
            caches: one a layer, already told of the step; see `write_context`.

        Returns:
            [T, 1, H], for `compute_logits`; the logits where the model has no head of its own.
        """
        if inputs.embeddings is not None and self._embedding is None:
            raise NotImplementedError(_NO_EMBEDDING)
        own = len(caches) - self._num_context_layers
        hidden_states = self._forward(inputs, self._all_caches(caches[:own]))
        if self._write_context is not None:
            self._write_context(caches[own:])
        return hidden_states

    def _forward(self, inputs: ForwardInputs, caches: list[Any]) -> mx.array:
        self._call = _Call(embeddings=inputs.embeddings, stops=True)
        try:
            with bound(inputs):
                logits: mx.array = self.model(inputs.input_ids[:, None], cache=caches)
        except HiddenReturned as returned:
            return returned.hidden_states
        finally:  # a call that fails must leave nothing for the next one
            self._call = _Call()
        if self._decoder is not None:
            raise RuntimeError("the model never called the module that holds its layers")
        return logits

    def compute_logits(self, hidden_states: mx.array) -> mx.array:
        """[N, V] logits of [N, 1, H], rows of what `forward_hidden` gave."""
        if self._decoder is None:
            return hidden_states[:, 0]
        self._call = _Call(hidden_states=hidden_states)
        try:
            # The model's own path behind its decoder: with whatever it does to logits.
            return self.model(mx.zeros(hidden_states.shape[:2], mx.int32))[:, 0]
        finally:
            self._call = _Call()

    @property
    def decoder_path(self) -> str | None:
        """Where the module is that returns hidden states; None where the model has no other."""
        return next(
            (path for path, module in self.model.named_modules() if module is self._decoder), None
        )

    def dense_hidden(self, token_ids: Sequence[int]) -> mx.array:
        """[T, H] hidden states of a text of T tokens, by the module's own cache; lazy.

        Raises:
            NotImplementedError: the model has no head of its own.
        """
        if self._decoder is None:
            raise NotImplementedError("the model's hidden states cannot be separated from its head")
        self._call = _Call(stops=True)
        try:
            self.model(mx.array([list(token_ids)]), cache=make_prompt_cache(self.model))
        except HiddenReturned as returned:
            return returned.hidden_states[0]
        finally:
            self._call = _Call()
        raise RuntimeError("the model never called the module that holds its layers")

    @property
    def text_args(self) -> Any:
        """mlx-lm's arguments of the text model, which a multimodal family has in a part."""
        text: Any = getattr(self.model, "language_model", self.model)
        return text.args

    def observe(self, observer: Callable[[mx.array], object]) -> None:
        """Shows `observer` the final hidden states of all rows, [T, 1, H], in every forward.

        Raises:
            NotImplementedError: the model has no head of its own.
        """
        if self._decoder is None:
            raise NotImplementedError(
                "the target's hidden states cannot be separated from its head"
            )
        self._observer = observer

    def _show(self, hidden_states: mx.array) -> mx.array:
        if self._observer is not None:
            self._observer(hidden_states)
        if self._call.stops:
            raise HiddenReturned(hidden_states)
        return hidden_states

    @property
    def input_embedding(self) -> nn.Module:
        """The model's embedding of tokens.

        Raises:
            NotImplementedError: it is not where mlx-lm's families keep it.
        """
        if self._embedding is None:
            raise NotImplementedError(_NO_EMBEDDING)
        return self._embedding

    def embedding_scale(self) -> float:
        """Factor by which the model multiplies its embeddings before the first layer (Gemma's).

        Found by a call that ends at that layer, for families keep it in many places.

        Raises:
            NotImplementedError: the model does something else to its embeddings.
        """
        (*_, size) = self.input_embedding(mx.zeros(1, mx.int32)).shape
        first = self.model.layers[0]
        family = type(first)
        self._call = _Call(embeddings=mx.ones((1, 1, size), mx.float32))
        # Some models give out copies of their lists of layers, so the layer itself has to change.
        first.__class__ = type(family.__name__, (family,), {"__call__": _show_input})
        try:
            self.model(mx.zeros((1, 1), mx.int32))
        except _Seen as seen:
            shown = seen.args[0].astype(mx.float32)
            scale = float(shown.reshape(-1)[0])
            if shown.size == size and bool(mx.allclose(shown, mx.full(shown.shape, scale))):
                return scale
        finally:
            first.__class__, self._call = family, _Call()
        raise NotImplementedError(
            "a drafter cannot share this model's embedding: the model does more than scale it. "
            "Choose another method"
        )

    @property
    def output_head(self) -> Callable[[mx.array], mx.array]:
        """From final hidden states to logits, up to a scale."""
        for name, module in self.model.named_modules():
            if name.split(".")[-1] == "lm_head":
                return cast(Callable[[mx.array], mx.array], module)
        return cast(Callable[[mx.array], mx.array], self.input_embedding.as_linear)


class _Seen(Exception):
    """Ends a call at the first layer, with its input."""


def _show_input(
    _: nn.Module, hidden_states: mx.array, *args: object, **options: object
) -> mx.array:
    """Called as a layer."""
    raise _Seen(hidden_states)


class HiddenStates:
    """What a model computes on the way to its logits, for heads that draft from it."""

    def __init__(
        self,
        target: ModelParts,
        layer_ids: Sequence[int] | None = None,
        key: str = "eagle_aux_hidden_state_layer_ids",
        outlive_forward: bool = True,
    ) -> None:
        """
        Args:
            target: the model.
            layer_ids: L stands for what the L-th layer passes on, from 1; None: the final states,
                after the model's last norm.
            key: of the draft's config.json that names them, for messages.
            outlive_forward: False where they are taken within each forward of the target.

        Raises:
            NotImplementedError: the model has no such layer, or does not show its states.
        """
        self._layer_ids = [0] if layer_ids is None else layer_ids
        self._newest: dict[int, mx.array] = {}
        if outlive_forward:
            target.observers.append(self)
        if layer_ids is None:
            target.observe(partial(self._note, 0))
            return
        layers = target.model.layers
        for layer_id in layer_ids:
            if not 1 <= layer_id <= len(layers):
                raise NotImplementedError(
                    f"the draft head reads the hidden states after layer {layer_id} of a model "
                    f"that has {len(layers)} ({key})"
                )
            follow_call(layers[layer_id - 1], partial(self._note, layer_id))

    def _note(self, layer_id: int, out: Any) -> Any:
        # Layers whose K/V others read return those behind their hidden states (Gemma 4).
        self._newest[layer_id] = out[0] if isinstance(out, tuple) else out
        return out

    @property
    def num_layers(self) -> int:
        """How many layers are shown, the final states counted as one."""
        return len(self._layer_ids)

    @property
    def newest(self) -> list[mx.array]:
        """[T, 1, H] of each layer that is shown; may be set to those of the same forward, built in
        another way."""
        return [self._newest[layer_id] for layer_id in self._layer_ids]

    @newest.setter
    def newest(self, states: Sequence[mx.array]) -> None:
        self._newest = dict(zip(self._layer_ids, states, strict=True))

    def take(self) -> mx.array:
        """[T, H], or [T, H * len(layer_ids)], of the forward built last; lazy."""
        states = [state[:, 0] for state in self.newest]
        self._newest.clear()
        return states[0] if len(states) == 1 else mx.concatenate(states, axis=-1)


_NO_EMBEDDING = "the model's token embedding is not where mlx-lm's families keep it"
