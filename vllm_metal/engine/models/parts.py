# SPDX-License-Identifier: Apache-2.0
"""Splits a loaded model's forward into embedding, hidden states and logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal.engine.attention.forward_inputs import ForwardInputs, bound
from vllm_metal.engine.models.embedding import decoder_of, embedding_norm_of, embedding_of
from vllm_metal.engine.models.stage import HiddenReturned
from vllm_metal.patches.mlx_patches.module_calls import follow_call


@dataclass
class _Call:
    """Results that replace parts of one call of the model."""

    embeddings: mx.array | None = None  # replace the embedding's result
    hidden_states: mx.array | None = None  # replace the decoder's result
    stops: bool = False  # whether the call ends when the decoder returns


class ModelParts:
    """A model whose forward can start after its embedding and stop before its head.

    mlx-lm's families compute logits in one call. Here the decoder and the embedding get classes of
    their own, so that a call of the model can take given results instead of computing them.
    """

    def __init__(
        self, model: nn.Module, all_caches: Callable[[list[Any]], list[Any]] = lambda caches: caches
    ) -> None:
        """
        Args:
            all_caches: maps caches of this rank's layers to those that the call expects, see Stage.
        """
        self.model = model
        self._all_caches = all_caches
        self._call = _Call()
        self._observer: Callable[[mx.array], object] | None = None
        #: Observers of hidden states, updated in every forward.
        self.observers: list[HiddenStates] = []
        self._write_context: Callable[[list[Any], mx.array | None], None] | None = None
        self._num_context_layers = 0
        self._decoder = decoder_of(model)
        if self._decoder is not None:
            follow_call(self._decoder, self._show, lambda: self._call.hidden_states)
        place = embedding_of(model)
        self._embedding: nn.Module | None = None if place is None else place[0][place[1]]
        self._embedding_norm = embedding_norm_of(model)
        embeds = self._embedding_norm or self._embedding
        if embeds is not None:
            follow_call(embeds, lambda out: out, lambda: self._call.embeddings)

    def embed(self, input_ids: mx.array) -> mx.array:
        """Returns [T, 1, H] embeddings of [T] int32 tokens, for `forward_hidden`.

        Raises NotImplementedError: the embedding is not where mlx-lm's families keep it.
        """
        return self.normed_embedding(input_ids[:, None])

    def normed_embedding(self, input_ids: mx.array) -> mx.array:
        """Returns [..., H] embeddings of [...] int32 tokens as the model's first layer reads them,
        but for their scale; errors as of `embed`.
        """
        embeddings = cast(mx.array, self.input_embedding(input_ids))
        norm = self._embedding_norm
        return embeddings if norm is None else cast(mx.array, norm(embeddings))

    def write_context(
        self, write: Callable[[list[Any], mx.array | None], None], num_layers: int
    ) -> None:
        """Makes every forward end with `write`, which writes K/V of a draft network's layers.

        Args:
            write: called with the draft layers' caches and `ForwardInputs.indices`.
            num_layers: the draft network's; its caches follow the model's in `forward_hidden`.
        """
        self._write_context, self._num_context_layers = write, num_layers

    def forward_hidden(self, inputs: ForwardInputs, caches: list[Any]) -> mx.array:
        """Runs the model without its head, on a batch of T tokens of length 1.

        Args:
            caches: one per layer, with the current step set; see `write_context`.

        Returns:
            [T, 1, H], for `compute_logits`; logits if the head cannot be separated.
        """
        if inputs.embeddings is not None and self._embedding is None:
            raise NotImplementedError(_NO_EMBEDDING)
        own = len(caches) - self._num_context_layers
        hidden_states = self._forward(inputs, self._all_caches(caches[:own]))
        if self._write_context is not None:
            self._write_context(caches[own:], inputs.indices)
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
        """Returns [N, V] logits of [N, 1, H] hidden states from `forward_hidden`."""
        if self._decoder is None:
            return hidden_states[:, 0]
        self._call = _Call(hidden_states=hidden_states)
        try:
            # The model's own code after its decoder, which may scale or cap logits.
            return self.model(mx.zeros(hidden_states.shape[:2], mx.int32))[:, 0]
        finally:
            self._call = _Call()

    @property
    def decoder_path(self) -> str | None:
        """Path of the module that returns hidden states; None if it is not separate."""
        return next(
            (path for path, module in self.model.named_modules() if module is self._decoder), None
        )

    def dense_hidden(self, token_ids: Sequence[int]) -> mx.array:
        """Returns [T, H] hidden states of a text of T tokens, with mlx-lm's own cache; lazy.

        Raises NotImplementedError: the model has no head of its own.
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
        """mlx-lm's arguments of the text model, which multimodal families nest."""
        text: Any = getattr(self.model, "language_model", self.model)
        return text.args

    @property
    def num_logits(self) -> int | None:
        """Number of logits if the module drops those of padding, as Inkling does; else None."""
        text: Any = getattr(self.model, "language_model", self.model)
        return getattr(getattr(text, "args", None), "unpadded_vocab_size", None)

    def observe(self, observer: Callable[[mx.array], object]) -> None:
        """Calls `observer` with the final hidden states, [T, 1, H], in every forward.

        Raises NotImplementedError: the model has no head of its own.
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
        """The model's token embedding.

        Raises NotImplementedError: the embedding is not where mlx-lm's families keep it.
        """
        if self._embedding is None:
            raise NotImplementedError(_NO_EMBEDDING)
        return self._embedding

    @property
    def final_norm(self) -> nn.Module:
        """The model's last norm, before its head."""
        return cast(nn.Module, (self._decoder or self.model).norm)

    @property
    def embedding_norm(self) -> nn.Module | None:
        """The norm that the model applies to token embeddings, but not to images'; None: none."""
        return self._embedding_norm

    def embedding_scale(self) -> float:
        """Returns the factor that the model applies to its embeddings (as Gemma does).

        Measures it by a call that ends at the first layer, as families store it in many places.

        Raises NotImplementedError: the model transforms its embeddings in another way.
        """
        if self._embedding_norm is not None:
            raise NotImplementedError(_NORMED_EMBEDDING)
        (*_, size) = self.input_embedding(mx.zeros(1, mx.int32)).shape
        first = self.model.layers[0]
        family = type(first)
        self._call = _Call(embeddings=mx.ones((1, 1, size), mx.float32))
        # Some models return a copy of their list of layers, so the layer itself has to change.
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
        raise NotImplementedError(_NORMED_EMBEDDING)

    @property
    def output_head(self) -> Callable[[mx.array], mx.array]:
        """Maps final hidden states to logits, up to a scale."""
        for name, module in self.model.named_modules():
            if name.split(".")[-1] == "lm_head":
                return cast(Callable[[mx.array], mx.array], module)
        return cast(Callable[[mx.array], mx.array], self.input_embedding.as_linear)


class _Seen(Exception):
    """Ends a call at the first layer; carries the layer's input."""


def _show_input(
    _: nn.Module, hidden_states: mx.array, *args: object, **options: object
) -> mx.array:
    """Stands in for a layer's `__call__`: raises `_Seen` with the layer's input."""
    raise _Seen(hidden_states)


class HiddenStates:
    """Hidden states of a model's layers, for draft heads that read them."""

    def __init__(
        self,
        target: ModelParts,
        layer_ids: Sequence[int] | None = None,
        key: str = "eagle_aux_hidden_state_layer_ids",
        outlive_forward: bool = True,
    ) -> None:
        """
        Args:
            layer_ids: numbers of layers, from 1, whose outputs are read; None: the final states,
                after the model's last norm.
            key: key of the draft's config.json with the layers, for messages.
            outlive_forward: False if `take` is called within each forward of the target.

        Raises NotImplementedError: the model has no such layer, or its states are not accessible.
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
                    f"the draft head needs hidden states of layer {layer_id} ({key}), but the "
                    f"model has {len(layers)} layers: choose a head made for this model"
                )
            follow_call(layers[layer_id - 1], partial(self._note, layer_id))

    def _note(self, layer_id: int, out: Any) -> Any:
        # Layers with shared K/V return these after their hidden states (Gemma 4).
        self._newest[layer_id] = out[0] if isinstance(out, tuple) else out
        return out

    @property
    def num_layers(self) -> int:
        """Number of arrays in `newest`."""
        return len(self._layer_ids)

    @property
    def newest(self) -> list[mx.array]:
        """[T, 1, H] of each layer; may be set to the results of a compiled forward."""
        return [self._newest[layer_id] for layer_id in self._layer_ids]

    @newest.setter
    def newest(self, states: Sequence[mx.array]) -> None:
        self._newest = dict(zip(self._layer_ids, states, strict=True))

    def take(self) -> mx.array:
        """Pops the newest forward's states, [T, H] or [T, H * len(layer_ids)]; lazy."""
        states = [state[:, 0] for state in self.newest]
        self._newest.clear()
        return states[0] if len(states) == 1 else mx.concatenate(states, axis=-1)


_NORMED_EMBEDDING = (
    "a drafter cannot share this model's embedding: the model does more than scale it. "
    "Choose another method"
)
_NO_EMBEDDING = "the model's token embedding is not where mlx-lm's families keep it"
