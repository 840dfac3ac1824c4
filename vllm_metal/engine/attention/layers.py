# SPDX-License-Identifier: Apache-2.0
"""Finds the state that each layer of a loaded model keeps between steps, by tracing one token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from vllm_metal.engine.attention.attention_layer import AttentionLayer
from vllm_metal.engine.attention.compressed_layer import RowProbe
from vllm_metal.engine.attention.index_layer import IndexLayer
from vllm_metal.engine.attention.latent_heads import Projections
from vllm_metal.engine.attention.paged_cache import LayerRotation
from vllm_metal.engine.attention.recurrent_layer import (
    RecurrentLayer,
    RecurrentProbe,
    RunLayer,
    SequenceLayer,
)
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer
from vllm_metal.patches.mlx_patches import (
    library_kernels,
    module_calls,
    multi_linear,
    rotations,
)
from vllm_metal.patches.mlx_patches.families.deepseek_v4 import ENTRIES_CACHE, KEYS_CACHE
from vllm_metal.patches.mlx_patches.families.deepseek_v41 import EntryRows
from vllm_metal.patches.mlx_patches.families.glm5_next import PooledKeyCache
from vllm_metal.patches.mlx_patches.families.inkling import MaskedWindowCache
from vllm_metal.patches.mlx_patches.families.z1t import CountingArraysCache
from vllm_metal.patches.mlx_patches.replacing import MLX_VLM
from vllm_metal.patches.mlx_patches.rotations import OfLayer
from vllm_metal.patches.mlx_patches.seam import (
    AttendingCache,
    BlockChoice,
    Choice,
    Scoring,
    num_positions,
)

__all__ = [
    "PROBES",
    "AttentionLayer",
    "RunLayer",
    "SequenceLayer",
    "attention_layers",
    "decoder_layers",
]


class Probe(Protocol):
    """Replaces a layer's cache during tracing, and records what the layer does with it."""

    def layer(self, name: str) -> StatefulLayer:
        """Returns the recorded layer, after a forward was built.

        Raises:
            NotImplementedError: the layer is not supported; the message continues a sentence that
                begins with the model's type.
        """


class _Chosen(NamedTuple):
    """Replaces an indexer's choice of positions."""

    by: Choice
    num_choices: int  # different ones per token
    query_size: int


class _AttentionProbe(AttendingCache):
    """Records what an attention layer writes and how it attends."""

    def __init__(self, window: int | None) -> None:
        self._window = window
        self.shared = False  # whether layers without K/V of their own read this layer's
        self.num_calls = 0  # calls of attention
        self._given: tuple[Any, Any] | None = None  # K and V as returned to the layer
        self._key_shape: tuple[int, ...] | None = None
        self._value_shape: tuple[int, ...] | None = None
        self._num_heads: int | None = None
        self._sinks: mx.Dtype | None = None
        self._softcap: float | None = None
        self._extent: int | None = None
        self._latent: nn.Module | None = None  # the module that computes latent attention
        self._offset = mx.zeros(1, mx.int32)
        self._rotated: OfLayer | None = None
        self._is_keys = False  # whether `_rotated` is of keys, and not of latents' second part
        self._rotates_queries = False
        self._chosen: _Chosen | None = None  # an indexer's choice here, or for this layer
        self._is_index = False  # whether the keys are an indexer's

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model reads {name!r} of its KV cache, which the paged KV cache does not have"
        )

    @property
    def offset(self) -> mx.array:
        return self._offset

    def make_mask(self, *args: object, **kwargs: object) -> None:
        window = kwargs.get("window_size")
        if window is not None and self._window != window:
            raise NotImplementedError(
                f"masks a window of {window} positions over a cache of "
                f"{self._window or 'all'} positions, which is not supported"
            )

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._key_shape, self._value_shape = keys.shape, values.shape
        self._rotated = rotations.of_keys(self._offset, keys, values)
        self._is_keys = self._rotated is not None and self._rotated.keys.result is keys
        self._given = self.keys_and_values() if self.shared else (keys, values)
        return self._given

    def keys_and_values(self) -> tuple[Any, Any]:
        """Returns placeholders for K and V, see SharedCache."""
        return self, self

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scoring: Scoring
    ) -> mx.array:
        self.num_calls += 1
        if self._given is not None and not all(map(_may_be_same, (keys, values), self._given)):
            raise NotImplementedError(
                "attention reads keys or values other than those it passed to its cache, "
                "which is not supported with the paged KV cache"
            )
        of = None if self._rotated is None else self._rotated.queries
        self._rotates_queries |= of is not None and queries is of.result
        self._num_heads = queries.shape[1]
        self._sinks = None if scoring.sinks is None else scoring.sinks.dtype
        self._softcap = scoring.softcap
        self._extent = None if scoring.bias is None else scoring.bias.shape[-1]
        assert self._value_shape is not None  # a layer writes before it attends
        return mx.zeros((*queries.shape[:3], self._value_shape[-1]), queries.dtype)

    def attend_latent(
        self, queries: mx.array, values: mx.array, position_queries: mx.array, scale: float
    ) -> mx.array | None:
        # Only mlx-lm's modules of latent attention have this projection.
        module = module_calls.under_way()[-1].module
        if "embed_q" not in module:
            return None
        self._num_heads, self._latent = queries.shape[1], module
        # With several rows, values have the heads' own width, which may differ from the queries'.
        return mx.zeros((*queries.shape[:3], values.shape[-1]), queries.dtype)

    def choose(
        self, keys: mx.array, queries: mx.array, weights: mx.array | None, choice: Choice
    ) -> _Chosen:
        self._key_shape, self._num_heads = keys.shape, queries.shape[1]
        num_choices = self._num_heads if isinstance(choice, BlockChoice) else 1
        self._chosen, self._is_index = _Chosen(choice, num_choices, queries.shape[-1]), True
        return self._chosen

    def attend_chosen(
        self,
        queries: mx.array,
        position_queries: mx.array,
        embed: Any,
        unembed: Any,
        scale: float,
        chosen: _Chosen,
        sinks: mx.array | None = None,
    ) -> mx.array:
        self._num_heads, self._chosen = queries.shape[1], chosen
        self._sinks = None if sinks is None else sinks.dtype
        self._latent = module_calls.under_way()[-1].module
        (_, value_size) = multi_linear.sizes(unembed)
        return mx.zeros((*queries.shape[:3], value_size), queries.dtype)

    def attend_to_blocks(self, queries: mx.array, scale: float, chosen: _Chosen) -> mx.array:
        self._chosen = chosen
        assert self._given is not None  # a layer writes before it attends
        return self.attend(queries, *self._given, Scoring(scale))

    def layer(self, name: str) -> AttentionLayer:
        if self._is_index and self._chosen is not None:
            assert self._key_shape is not None and self._num_heads is not None
            (by, _, query_size), row_size = self._chosen, self._key_shape[-1]
            return IndexLayer.of(name, self._num_heads, row_size, by, query_size)
        if self._key_shape is None or self._num_heads is None:
            raise NotImplementedError(
                f"computes attention in {name} with code of its own, which is not supported "
                "with the paged KV cache"
            )
        assert self._value_shape is not None
        _, num_kv_heads, _, head_size = self._key_shape
        value_size = self._value_shape[-1]
        heads = None
        if self._latent is not None:
            projections = Projections(self._latent.embed_q, self._latent.unembed_out)
            heads = projections.heads(rotated=value_size)
            if self._chosen is None:  # otherwise the module has the cache attend
                module_calls.ask_caches(type(self._latent))
            head_size, value_size = head_size + value_size, head_size
        return AttentionLayer(
            name,
            self._num_heads,
            num_kv_heads,
            head_size,
            self._window,
            self._sinks,
            None if value_size == head_size else value_size,
            self.num_calls - 1 if self.shared else 0,
            self._latent is not None,
            self._softcap,
            heads,
            self._rotation(),
            extent=self._extent,
            topk=None if self._chosen is None else num_positions(self._chosen.by),
            choices=1 if self._chosen is None else self._chosen.num_choices,
        )

    def _rotation(self) -> LayerRotation | None:
        if self._rotated is None or self._is_keys == (self._latent is not None):
            return None
        return LayerRotation(self._rotated.keys.rotation.kind, self._rotates_queries)


def _may_be_same(array: Any, given: Any) -> bool:
    # They may be the same array in another dtype.
    if isinstance(array, mx.array) and isinstance(given, mx.array):
        return array.shape == given.shape
    return array is given or array.__class__ is given.__class__


def _rotating(cache: RotatingKVCache) -> Probe:
    if cache.keep:
        raise NotImplementedError(
            f"keeps its first {cache.keep} positions beside a window, which is not supported"
        )
    return _AttentionProbe(int(cache.max_size))


#: Probes by the type of mlx-lm's cache. A new kind of layer needs a line here.
PROBES: Mapping[type, Callable[[Any], Probe]] = {
    KVCache: lambda cache: _AttentionProbe(None),
    RotatingKVCache: _rotating,
    ArraysCache: RecurrentProbe,
    CountingArraysCache: RecurrentProbe,
    PooledKeyCache: lambda cache: _AttentionProbe(None),
    MaskedWindowCache: lambda cache: _AttentionProbe(cache.window),
    EntryRows: lambda cache: RowProbe(),
}
#: The same by name: mlx-vlm has classes of its own with mlx-lm's names and protocol.
_BY_NAME = {kind.__name__: probe for kind, probe in PROBES.items()}
_BY_NAME |= dict.fromkeys((KEYS_CACHE, ENTRIES_CACHE), lambda cache: RowProbe())
_OF_MLX_VLM = f"{MLX_VLM}cache"


def attention_layers(model: nn.Module, model_type: str) -> list[StatefulLayer]:
    """Finds the layers with state by building, not running, a forward of one token.

    `model_type` is for messages.

    Raises:
        NotImplementedError: a layer keeps state of an unknown kind, or does its own attention.
    """
    try:
        return _layers(model)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"model_type {model_type!r} {error}. Choose a model of a family in docs/models.md"
        ) from error


def _layers(model: nn.Module) -> list[StatefulLayer]:
    with library_kernels.noted() as calls:
        probes = _probed(model, 1)
    states = _recurrent(probes)
    if states:
        # A state that grows with the tokens is not supported: a second length shows it.
        longer = _recurrent(_probed(model, 2))
        for name, probe in states.items():
            probe.check_shapes_of(longer[name], name)
    sharing = len(probes) < len(model.layers)
    num_calls = [probe.num_calls for probe in probes if isinstance(probe, _AttentionProbe)]
    # Fewer caches than layers: the other layers read K/V of these, or do not attend.
    if sharing and sum(num_calls) not in (len(model.layers), len(num_calls)):
        raise NotImplementedError(
            f"has {len(model.layers)} layers and {len(probes)} caches, but only "
            f"{sum(num_calls)} attend through the paged KV cache"
        )
    layers = [probe.layer(name) for name, probe in _by_name(probes)]
    if not any(isinstance(layer, RunLayer) for layer in layers):
        # Steps launch our own kernels; mlx-lm's only serve the dense check, which runs whole texts.
        calls = [call for call in calls if call.takes_texts]
    layers = [
        replace(layer, library_calls=tuple(calls)) if isinstance(layer, RecurrentLayer) else layer
        for layer in layers
    ]
    most = max((layer.num_taps for layer in layers if isinstance(layer, SequenceLayer)), default=0)
    return [
        replace(layer, most_taps=most) if isinstance(layer, SequenceLayer) else layer
        for layer in layers
    ]


def _probed(model: nn.Module, num_tokens: int) -> list[Probe | list[Probe]]:
    # Traces a forward of `num_tokens`. A layer with several caches gets a list of probes.
    probes: list[Probe | list[Probe]] = [
        [_probe(each) for each in cache.caches] if hasattr(cache, "caches") else _probe(cache)
        for cache in make_prompt_cache(model)
    ]
    if len(probes) < len(model.layers):
        for probe in probes:
            if isinstance(probe, _AttentionProbe):
                probe.shared = True
    caches = [tuple(probe) if isinstance(probe, list) else probe for probe in probes]
    try:
        with module_calls.noted(model), rotations.noted():
            model(mx.zeros((1, num_tokens), mx.int32), cache=caches)
    except Exception as error:
        raise NotImplementedError(f"does not run on the paged cache: {error}") from error
    return probes


def _recurrent(probes: Sequence[Probe | list[Probe]]) -> dict[str, RecurrentProbe]:
    return {name: probe for name, probe in _by_name(probes) if isinstance(probe, RecurrentProbe)}


def decoder_layers(
    layer: nn.Module, windows: Mapping[str, int | None], hidden_size: int, dtype: mx.Dtype
) -> list[StatefulLayer]:
    """Finds the KV caches of a single layer, by building a forward of one token.

    Args:
        layer: mlx-lm's; takes hidden states of `dtype`, a mask and a cache for each window.
        windows: maps names of the states to the number of positions that a query sees, itself
            included; None: no sliding window.

    Raises:
        NotImplementedError: the layer is not supported; the message continues the layer's name.
    """
    probes = {
        name: _probe(KVCache() if size is None else RotatingKVCache(size))
        for name, size in windows.items()
    }
    try:
        with module_calls.noted(layer), rotations.noted():
            layer(mx.zeros((1, 1, hidden_size), dtype), None, *probes.values())
    except Exception as error:
        raise NotImplementedError(f"does not run on the paged cache: {error}") from error
    return [probe.layer(name) for name, probe in probes.items()]


def _by_name(probes: Sequence[Probe | list[Probe]]) -> Iterator[tuple[str, Probe]]:
    for index, of_layer in enumerate(probes):
        if isinstance(of_layer, list):
            for number, probe in enumerate(of_layer):
                yield f"layers.{index}.{number}", probe
        else:
            yield f"layers.{index}", of_layer


def _probe(cache: Any) -> Probe:
    kind = type(cache)
    probe = _BY_NAME.get(kind.__name__) if kind.__module__ == _OF_MLX_VLM else PROBES.get(kind)
    if probe is None:
        raise NotImplementedError(f"uses caches of type {kind.__name__}, which are not supported")
    return probe(cache)
