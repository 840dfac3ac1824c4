# SPDX-License-Identifier: Apache-2.0
"""Decides a block's size, a hybrid's too, which layers share blocks, and where each lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs

from metal_kernels.layout import BLOCK_SIZES
from vllm_metal.engine.kv_cache.layer_cache import KVBackend
from vllm_metal.engine.kv_cache.layer_state import LayerState
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer

if TYPE_CHECKING:
    from vllm.config import CacheConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_ALIGNMENT = 64  # of pages, in bytes: elements of any dtype
_STEP = BLOCK_SIZES[0]  # larger blocks are multiples of it
#: Tokens of a block where there are states only: one state of this many is kept of a text.
_STATES_ONLY = 256


def block_size_for(
    layers: Sequence[StatefulLayer], block_size: int, dtype: mx.Dtype, asked: bool = False
) -> int:
    """Tokens of a block: as many as were wanted, or more where states lie in the pool.

    All pages of a pool have one size, so a block of K and V is made large enough for a state. That
    is also how often a state is kept while a request runs: prefix-cache hits end at whole blocks.

    Args:
        layers: of all networks.
        block_size: the user's, or the default.
        dtype: of the pool's elements.
        asked: whether the user asked for it; else it is larger where there are states only.
    """
    layers = [layer for layer in layers if not layer.guest]
    states = [layer.state_bytes for layer in layers if layer.state_bytes]
    if not states:
        return block_size
    room = max((layer.room(_STEP, dtype) for layer in layers), default=0)
    if not room:
        return block_size if asked else max(block_size, _STATES_ONLY)
    return max(block_size, _STEP * -(-max(states) // room))


def choose_block_size(cache: CacheConfig, layers: Sequence[StatefulLayer], dtype: mx.Dtype) -> int:
    """Makes blocks large enough for a state, before vLLM lays out the pool.

    Args:
        cache: vLLM's configuration, which is changed where there are states.
        layers, dtype: see `block_size_for`.

    Returns:
        Bytes of a request's states; 0: there are none.
    """
    state_bytes = sum(layer.state_bytes for layer in layers)
    if state_bytes:
        # vLLM has "none" without prefix caching; where a state lies is the same in both here. An
        # engine in another process learns of it by `state_modes`.
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
    """One spec a layer, by layer name; vLLM groups them and hands each group its blocks.

    Layers that keep the same of their context form one group, whatever their shapes. Groups share
    memory, which takes layers of one shape. Where some differ, as those of a draft model do from
    the target's, windows are not made use of: then all layers of attention form one group that
    keeps the whole context. Layers with states form groups of their own, in the same memory.

    Guests keep the whole context, in blocks of a group that does. Where there is no other group,
    they join it. Else vLLM does not know them: the pages of the others have room for them, so that
    a block's bytes are those of its layers and the guests'. Blocks of other groups leave that room
    empty.

    Args:
        layers: of all networks over the pool.
        block_size: tokens of a block, see `block_size_for`.
        dtype: of the pool's elements.
    """
    guests = [layer for layer in layers if layer.guest]
    if guests:
        hosts = [layer for layer in layers if not layer.guest]
        return _with_guests(kv_cache_specs(hosts, block_size, dtype), guests, block_size, dtype)
    attending = [layer for layer in layers if not layer.state_bytes]
    storage_keys = {layer.storage_key for layer in attending}
    contexts = {layer.context for layer in attending}
    one_group = len(storage_keys) > 1 and len(contexts) > 1
    specs = {layer.name: layer.spec(block_size, dtype, one_group) for layer in layers}
    if len(attending) < len(layers):
        return _padded(specs, layers)
    return specs


def _with_guests(
    specs: dict[str, KVCacheSpec],
    guests: Sequence[StatefulLayer],
    block_size: int,
    dtype: mx.Dtype,
) -> dict[str, KVCacheSpec]:
    """Specs of all layers that vLLM is to know, with room for guests.

    Raises:
        NotImplementedError: no layer keeps the whole context.
    """
    if not any(isinstance(spec, FullAttentionSpec) for spec in specs.values()):
        raise NotImplementedError(
            "a draft network is not supported with a model whose layers all have windows or keep "
            "states only: no layer keeps the whole context. Choose method ngram or suffix"
        )
    own = {guest.name: guest.spec(block_size, dtype, True) for guest in guests}
    if all(isinstance(spec, FullAttentionSpec) for spec in specs.values()):
        return specs | own
    # vLLM cuts layers of a kind into groups as large as the smallest kind, or as the largest where
    # that is less than half as many more.
    counts = Counter(specs.values()).values()
    group_size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    share = -(-sum(spec.page_size_bytes for spec in own.values()) // group_size)
    page = (
        max(spec.page_size_bytes for spec in specs.values()) + -(-share // _ALIGNMENT) * _ALIGNMENT
    )
    return {name: replace(cast(Any, spec), page_size_padded=page) for name, spec in specs.items()}


def groups_of(config: KVCacheConfig, layers: Sequence[StatefulLayer]) -> dict[str, int]:
    """KV cache group by layer name; a guest's is the first that keeps the whole context."""
    groups = config.kv_cache_groups
    found = {name: g for g, group in enumerate(groups) for name in group.layer_names}
    guests = [layer.name for layer in layers if layer.name not in found]
    if guests:
        host = next(g for g, group in enumerate(groups) if _keeps_all(group.kv_cache_spec))
        found |= dict.fromkeys(guests, host)
    return found


def _keeps_all(spec: KVCacheSpec) -> bool:
    """Whether a group's layers keep the whole context."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(map(_keeps_all, spec.kv_cache_specs.values()))
    return isinstance(spec, FullAttentionSpec)


def _padded(
    specs: Mapping[str, KVCacheSpec], layers: Sequence[StatefulLayer]
) -> dict[str, KVCacheSpec]:
    """Pages of one size: with room for K and V of every shape there is, or for a state."""
    attended: dict[Hashable, int] = {}
    states: dict[Hashable, int] = {}
    for layer in layers:
        sizes = states if layer.state_bytes else attended
        key, size = layer.storage_key, specs[layer.name].page_size_bytes
        sizes[key] = max(sizes.get(key, 0), size)
    page = max(sum(attended.values()), sum(states.values()) if not attended else 0)
    page = max(page, *states.values())
    # All of vLLM's specs that are in use have the field; their base class lacks it.
    return {name: replace(cast(Any, spec), page_size_padded=page) for name, spec in specs.items()}


def host_of_states(
    layers: Sequence[StatefulLayer], block_size: int, dtype: mx.Dtype
) -> StatefulLayer | None:
    """The layer in whose storage states lie: the first with most room; None: no layer attends."""
    attending = (layer for layer in layers if not (layer.state_bytes or layer.guest))
    return max(attending, key=lambda layer: layer.room(block_size, dtype), default=None)


def allocate_kv_caches(
    config: KVCacheConfig,
    layers: Sequence[StatefulLayer],
    block_size: int,
    dtype: mx.Dtype,
    backend: KVBackend,
) -> dict[str, LayerState]:
    """The pool: a storage for each layer name, the same one for layers that vLLM overlays.

    vLLM places each layer at a byte offset; layers of different groups at one offset share memory,
    since a block belongs to one group at a time. States lie in the memory of K and V where there
    are any at their offset.

    Raises:
        NotImplementedError: layers of K and V that share memory differ in shape.
    """
    by_name = {layer.name: layer for layer in layers}
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
                f"{name} has K/V of {layer.storage_key}, but another layer in the same memory "
                f"has {first}; use --disable-hybrid-kv-cache-manager"
            )
        placed[name] = storage(layer, (offset, layer.storage_key))
    roomy = host_of_states(layers, block_size, dtype)
    for name in with_states:
        layer, offset = by_name[name], offset_of[name]
        key = offset, layer.storage_key
        beside = None if roomy is None else shared.get((offset, roomy.storage_key))
        if key not in shared and beside is not None:
            shared[key] = layer.share(beside.storage)
        placed[name] = storage(layer, key)
    guests = (layer for layer in layers if layer.name not in offset_of)
    return placed | {layer.name: layer.allocate(*pool) for layer in guests}
