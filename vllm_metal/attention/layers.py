# SPDX-License-Identifier: Apache-2.0
"""What each attention layer of a loaded model needs of a KV cache, read off the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from metal_kernels.paged_attention import AttentionShape
from vllm_metal.attention.seam import AttendingCache


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's share of the KV cache."""

    name: str  # "layers.N", as vLLM's KV cache groups list it
    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None  # positions a query sees, itself included; None: all before it
    sinks: mx.Dtype | None = None  # of the logits that take part in its softmax only; None: none

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_size, self.head_size)


class _Probe(AttendingCache):
    """Notes what a layer writes and whether its attention comes through the seam."""

    def __init__(self) -> None:
        self.offset = mx.zeros(1, mx.int32)
        self.key_shape: tuple[int, ...] | None = None
        self.value_shape: tuple[int, ...] | None = None
        self.num_heads: int | None = None
        self.sinks: mx.Dtype | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.key_shape, self.value_shape = keys.shape, values.shape
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        self.num_heads = queries.shape[1]
        self.sinks = None if sinks is None else sinks.dtype
        return queries


def attention_layers(model: nn.Module, model_type: str) -> list[AttentionLayer]:
    """Reads the layers by building, not running, a forward of one token.

    Raises:
        NotImplementedError: a layer keeps state that is not paged K/V, or does its own attention.
    """
    dense = make_prompt_cache(model)
    windows = [_window(cache, model_type) for cache in dense]
    probes = [_Probe() for _ in dense]
    try:
        model(mx.zeros((1, 1), mx.int32), cache=probes)
    except Exception as error:
        raise NotImplementedError(
            f"model_type {model_type!r} does not run on the paged cache: {error}"
        ) from error
    return [
        _layer(f"layers.{index}", probe, window, model_type)
        for index, (probe, window) in enumerate(zip(probes, windows, strict=True))
    ]


def _window(cache: Any, model_type: str) -> int | None:
    if type(cache) is KVCache:
        return None
    if type(cache) is RotatingKVCache and cache.keep == 0:
        return int(cache.max_size)
    raise NotImplementedError(
        f"model_type {model_type!r} keeps {type(cache).__name__} layers, "
        "which the paged path does not serve"
    )


def _layer(name: str, probe: _Probe, window: int | None, model_type: str) -> AttentionLayer:
    if probe.key_shape is None or probe.num_heads is None:
        raise NotImplementedError(
            f"model_type {model_type!r} computes attention in {name} by itself, "
            "so the paged path cannot serve it"
        )
    if probe.key_shape != probe.value_shape:
        raise NotImplementedError(
            f"model_type {model_type!r}: keys {probe.key_shape} and values {probe.value_shape} of "
            f"{name} differ in shape, which the paged path does not serve"
        )
    _, num_kv_heads, _, head_size = probe.key_shape
    return AttentionLayer(name, probe.num_heads, num_kv_heads, head_size, window, probe.sinks)
