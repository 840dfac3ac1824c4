# SPDX-License-Identifier: Apache-2.0
"""Chooses the block size and each layer's KV cache spec, and allocates the pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs

from metal_kernels.layout import BLOCK_SIZES
from vllm_metal.engine.kv_cache.layer_cache import KVBackend, KVShape
from vllm_metal.engine.kv_cache.layer_state import LayerState
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_ALIGNMENT = 64  # of pages, in bytes; fits all dtypes
_STEP = BLOCK_SIZES[0]  # larger blocks are multiples of it
#: Tokens per block if all layers are recurrent: one state is cached per block.
_STATES_ONLY = 256


def block_size_for(
    layers: Sequence[StatefulLayer], block_size: int, dtype: mx.Dtype, asked: bool = False
) -> int:
    """Returns the tokens per block: `block_size`, or more if the pool holds recurrent states.

    All pages of a pool have one size, so a block of K and V must be large enough for a state. A
    state is also cached once per block while a request runs: prefix-cache hits end at whole blocks.

    Args:
        layers: the layers of all networks.
        block_size: the user's, or the default.
        dtype: dtype of the pool's elements.
        asked: whether the user set it; otherwise it is larger if all layers are recurrent.
    """
    layers = [layer for layer in layers if not layer.is_auxiliary]
    states = [layer.state_bytes for layer in layers if layer.state_bytes]
    if not states:
        return block_size
    room = max((layer.room(_STEP, dtype) for layer in layers), default=0)
    if not room:
        return block_size if asked else max(block_size, _STATES_ONLY)
    return max(block_size, _STEP * -(-max(states) // room))


def choose_block_size(cache: CacheConfig, layers: Sequence[StatefulLayer], dtype: mx.Dtype) -> int:
    """Sets vLLM's block size before it lays out the pool, large enough for a recurrent state.

    Args:
        cache: vLLM's configuration; changed if there are recurrent layers.
        layers, dtype: see `block_size_for`.

    Returns:
        Bytes of a request's recurrent states; 0: there are none.
    """
    state_bytes = sum(layer.state_bytes for layer in layers)
    if state_bytes:
        # vLLM uses "none" without prefix caching; here both modes store states the same way.
        # `state_modes` sets this in engines of other processes.
        cache.mamba_cache_mode = "align"
        cache.block_size = block_size_for(
            layers, cache.block_size, dtype, cache.user_specified_block_size
        )
        if cache.enable_prefix_caching:
            cache.mamba_block_size = cache.block_size
    return state_bytes


def kv_cache_specs(
    layers: Sequence[StatefulLayer], block_size: int, dtype: mx.Dtype
) -> dict[str, KVCacheSpec]:
    """Returns a spec per layer name, from which vLLM forms KV cache groups and allocates blocks.

    Attention layers with the same window form one group. Groups share memory, which requires one
    shape for all layers. Layers that differ in their number of heads alone are packed: several with
    few heads are one layer for vLLM, with as many heads as the others have, and share its blocks.
    If shapes differ otherwise, as between a draft model and its target, all attention layers form
    one group that keeps the whole context, and windows save no memory. Recurrent layers form groups
    of their own, in the same memory.

    Auxiliary layers (of block drafters and indexers) use the block ids of a group that keeps the
    whole context. If that is the only group, they join it. Otherwise vLLM does not see them: the
    pages of all groups are padded by the size of their rows, and other groups waste the padding.

    Args:
        layers: the layers of all networks over the pool.
        block_size: tokens per block, see `block_size_for`.
        dtype: dtype of the pool's elements.

    Raises:
        NotImplementedError: there are auxiliary layers, but no layer keeps the whole context.
    """
    auxiliary = [layer for layer in layers if layer.is_auxiliary]
    if auxiliary:
        others = [layer for layer in layers if not layer.is_auxiliary]
        specs = kv_cache_specs(others, block_size, dtype)
        return _with_auxiliary(specs, auxiliary, block_size, dtype)
    layers = _packed(layers)
    attending = [layer for layer in layers if not layer.state_bytes]
    storage_keys = {layer.storage_key for layer in attending}
    contexts = {layer.context for layer in attending}
    one_group = len(storage_keys) > 1 and len(contexts) > 1
    specs = {layer.name: layer.spec(block_size, dtype, one_group) for layer in layers}
    if len(attending) < len(layers):
        return _padded(specs, layers)
    return specs


def _packed(layers: Sequence[StatefulLayer]) -> Sequence[StatefulLayer]:
    """Replaces attention layers by packs where all pages can then be of one size.

    A pack has the name of its first layer. Layers of several networks, or that keep other parts of
    the context, are packed separately.
    """
    attending = [layer for layer in layers if not layer.state_bytes]
    shapes = {layer.storage_key for layer in attending}
    groups = len({layer.context for layer in attending}) + (len(attending) < len(layers))
    if len(shapes) < 2 or groups < 2:
        return layers  # one group may have any shapes
    largest = max(cast("set[KVShape]", shapes), key=lambda shape: shape.num_heads)
    times = {shape: cast(KVShape, shape).times_in(largest) for shape in shapes}
    if not all(times.values()):
        return layers
    seen: Counter[Hashable] = Counter()
    found = []
    for layer in layers:
        count = 1 if layer.state_bytes else times[layer.storage_key]
        if seen[_pack_key(layer)] % count == 0:
            found.append(layer if count == 1 else layer.pack(count))
        seen[_pack_key(layer)] += 1
    return found


def _pack_key(layer: StatefulLayer) -> Hashable:
    network, _, _ = layer.name.rpartition("layers.")
    return network, layer.storage_key, layer.context


def _with_auxiliary(
    specs: dict[str, KVCacheSpec],
    auxiliary: Sequence[StatefulLayer],
    block_size: int,
    dtype: mx.Dtype,
) -> dict[str, KVCacheSpec]:
    """Adds auxiliary layers to one group, or pads pages of several; see `kv_cache_specs`."""
    if not any(isinstance(spec, FullAttentionSpec) for spec in specs.values()):
        raise NotImplementedError(
            "a draft network is not supported with this model: none of its layers attends to the "
            "whole context. Choose method ngram or suffix"
        )
    own = {layer.name: layer.spec(block_size, dtype, True) for layer in auxiliary}
    if all(isinstance(spec, FullAttentionSpec) for spec in specs.values()):
        return specs | own
    # vLLM's group size is the smallest number of layers of a kind, or the largest if that is less
    # than 1.5 times as many.
    counts = Counter(specs.values()).values()
    group_size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    share = -(-sum(spec.page_size_bytes for spec in own.values()) // group_size)
    page = (
        max(spec.page_size_bytes for spec in specs.values()) + -(-share // _ALIGNMENT) * _ALIGNMENT
    )
    return {name: replace(cast(Any, spec), page_size_padded=page) for name, spec in specs.items()}


def groups_of(config: KVCacheConfig, layers: Sequence[StatefulLayer]) -> dict[str, int]:
    """Maps each layer's name to the index of its KV cache group.

    Layers that vLLM does not list use the blocks of the first group that keeps the whole context.
    """
    groups = config.kv_cache_groups
    found = {name: g for g, group in enumerate(groups) for name in group.layer_names}
    found |= {name: found[first] for name, (first, _) in _indices_in_packs(found, layers).items()}
    unlisted = [layer.name for layer in layers if layer.name not in found]
    if unlisted:
        whole = next(g for g, group in enumerate(groups) if _keeps_all(group.kv_cache_spec))
        found |= dict.fromkeys(unlisted, whole)
    return found


def _indices_in_packs(
    known: Container[str], layers: Sequence[StatefulLayer]
) -> dict[str, tuple[str, int]]:
    """Maps names that vLLM does not know to the pack that holds the layer, and its number there.

    `known`: names of vLLM's layers, packs among them.
    """
    newest: dict[Hashable, tuple[str, int]] = {}  # pack of each key, and the layers it has so far
    found: dict[str, tuple[str, int]] = {}
    for layer in layers:
        if layer.is_auxiliary:
            continue
        if layer.name in known:
            newest[_pack_key(layer)] = layer.name, 1
        else:
            name, number = newest[_pack_key(layer)]
            found[layer.name], newest[_pack_key(layer)] = (name, number), (name, number + 1)
    return found


def _keeps_all(spec: KVCacheSpec) -> bool:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(map(_keeps_all, spec.kv_cache_specs.values()))
    return isinstance(spec, FullAttentionSpec)


def _padded(
    specs: Mapping[str, KVCacheSpec], layers: Sequence[StatefulLayer]
) -> dict[str, KVCacheSpec]:
    """Pads all pages to one size, with room for K and V of every shape or for a state."""
    attended: dict[Hashable, int] = {}
    states: dict[Hashable, int] = {}
    for layer in layers:
        sizes = states if layer.state_bytes else attended
        key, size = layer.storage_key, specs[layer.name].page_size_bytes
        sizes[key] = max(sizes.get(key, 0), size)
    page = max(sum(attended.values()), sum(states.values()) if not attended else 0)
    page = max(page, *states.values())
    # vLLM's specs in use have the field, but their base class lacks it.
    return {name: replace(cast(Any, spec), page_size_padded=page) for name, spec in specs.items()}


def host_of_states(
    layers: Sequence[StatefulLayer], block_size: int, dtype: mx.Dtype
) -> StatefulLayer | None:
    """Returns the attention layer with the most room for a state; None without attention layers."""
    attending = (layer for layer in layers if not (layer.state_bytes or layer.is_auxiliary))
    return max(attending, key=lambda layer: layer.room(block_size, dtype), default=None)


def allocate_kv_caches(
    config: KVCacheConfig,
    layers: Sequence[StatefulLayer],
    block_size: int,
    dtype: mx.Dtype,
    backend: KVBackend,
) -> dict[str, LayerState]:
    """Allocates the pool; returns a storage per layer name, the same one for layers that share it.

    vLLM gives each layer a byte offset. Layers of different groups at one offset share memory, as a
    block belongs to one group at a time. Recurrent states use the memory of K and V at their
    offset, if there are any.

    Raises NotImplementedError: attention layers that share memory have different shapes.
    """
    own = {layer.name: layer for layer in layers}
    by_name = own | _packs_of(config, own)
    pool = config.num_blocks, block_size, dtype, backend
    offset_of = {
        name: tensor.offset + index * tensor.layer_stride
        for tensor in config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
    }
    attending = [name for name in offset_of if not by_name[name].state_bytes]
    with_states = [name for name in offset_of if by_name[name].state_bytes]
    shared: dict[tuple[int, Hashable], LayerState] = {}
    placed: dict[str, LayerState] = {}

    def storage(layer: StatefulLayer, key: tuple[int, Hashable]) -> LayerState:
        if key not in shared:
            shared[key] = layer.allocate(*pool)
        return shared[key]

    first_keys: dict[int, Hashable] = {}
    for name in attending:
        layer, offset = by_name[name], offset_of[name]
        first = first_keys.setdefault(offset, layer.storage_key)
        if first != layer.storage_key and not with_states:
            raise NotImplementedError(
                f"{name} stores K/V as {layer.storage_key}, but another layer that shares its "
                f"memory as {first}; use --disable-hybrid-kv-cache-manager"
            )
        placed[name] = storage(layer, (offset, layer.storage_key))
    host = host_of_states(layers, block_size, dtype)
    for name in with_states:
        layer, offset = by_name[name], offset_of[name]
        key = offset, layer.storage_key
        host_state = None if host is None else shared.get((offset, host.storage_key))
        if key not in shared and host_state is not None:
            shared[key] = layer.share(host_state.storage)
        placed[name] = storage(layer, key)
    in_packs = _indices_in_packs(offset_of, layers)
    in_packs |= {name: (name, 0) for name, layer in by_name.items() if layer is not own[name]}
    placed |= {
        name: own[name].share(placed[first].storage, part)
        for name, (first, part) in in_packs.items()
    }
    unlisted = (layer for layer in layers if layer.name not in placed)
    return placed | {layer.name: layer.allocate(*pool) for layer in unlisted}


def _packs_of(
    config: KVCacheConfig, layers: Mapping[str, StatefulLayer]
) -> dict[str, StatefulLayer]:
    """Returns the packs (layers that share one vLLM layer) by the names of their first layers."""
    found: dict[str, StatefulLayer] = {}
    for group in config.kv_cache_groups:
        spec: Any = group.kv_cache_spec
        for name in group.layer_names:
            layer = layers.get(name)
            if layer is None or not isinstance(layer.storage_key, KVShape):
                continue
            of_layer = spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                of_layer = spec.kv_cache_specs[name]
            count = of_layer.num_kv_heads // layer.storage_key.num_heads
            if count > 1:
                found[name] = layer.pack(count)
    return found
