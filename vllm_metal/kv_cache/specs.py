# SPDX-License-Identifier: Apache-2.0
"""Layers of the model as vLLM's KV cache specs, and vLLM's placement as storages of the pool."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_metal.kv_cache.layer_cache import LayerKVCache
from vllm_metal.kv_cache.layer_state import LayerState
from vllm_metal.kv_cache.stateful_layer import StatefulLayer

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def kv_cache_specs(
    layers: Sequence[StatefulLayer], block_size: int, dtype: mx.Dtype
) -> dict[str, KVCacheSpec]:
    """One spec a layer, by layer name; vLLM groups them and hands each group its blocks.

    Layers that keep the same of their context form one group, whatever their shapes. Groups share
    memory, which takes layers of one shape. Where some differ, as those of a draft model do from
    the target's, windows are not made use of: then all layers of attention form one group that
    keeps the whole context. Layers that keep other state than K/V stay in groups of their own, and
    a page has room for either.

    Args:
        layers: of all networks over the pool.
        block_size: tokens of a block.
        dtype: of the pool's elements.
    """
    memories = {layer.memory for layer in layers}
    contexts = {layer.context for layer in layers}
    one_group = len(memories) > 1 and len(contexts) > 1
    specs = {layer.name: layer.spec(block_size, dtype, one_group) for layer in layers}
    families = {layer.name: type(layer) for layer in layers}
    return _padded(specs, families) if len(set(families.values())) > 1 else specs


def _padded(
    specs: Mapping[str, KVCacheSpec], families: Mapping[str, Hashable]
) -> dict[str, KVCacheSpec]:
    """Pages of one size, with room for the largest page of every family of layers.

    Layers of different families that vLLM places at one offset get a storage each.
    """
    largest: dict[Hashable, int] = {}
    for name, spec in specs.items():
        family = families[name]
        largest[family] = max(largest.get(family, 0), spec.page_size_bytes)
    page = sum(largest.values())
    # Both of vLLM's specs that are in use have the field; their base class lacks it.
    return {name: replace(cast(Any, spec), page_size_padded=page) for name, spec in specs.items()}


def allocate_kv_caches(
    config: KVCacheConfig,
    layers: Sequence[StatefulLayer],
    block_size: int,
    dtype: mx.Dtype,
    kv_cache_type: type[LayerKVCache],
) -> dict[str, LayerState]:
    """The pool: a storage for each layer name, the same one for layers that vLLM overlays.

    vLLM places each layer at a byte offset; layers of different groups at one offset share memory,
    since a block belongs to one group at a time.

    Raises:
        NotImplementedError: layers of one family that share memory differ in shape.
    """
    by_name = {layer.name: layer for layer in layers}
    shared: dict[tuple[int, type[StatefulLayer]], tuple[Hashable, LayerState]] = {}
    placed: dict[str, LayerState] = {}
    for tensor in config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            layer = by_name[name]
            place = (tensor.offset + index * tensor.layer_stride, type(layer))
            if place not in shared:
                state = layer.allocate(config.num_blocks, block_size, dtype, kv_cache_type)
                shared[place] = (layer.memory, state)
            memory, placed[name] = shared[place]
            if memory != layer.memory:
                raise NotImplementedError(
                    f"{name} has K/V of {layer.memory} (heads, head size) where another layer of "
                    f"its memory has {memory}; use --disable-hybrid-kv-cache-manager"
                )
    return placed
