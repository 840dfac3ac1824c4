# SPDX-License-Identifier: Apache-2.0
"""Layers of a target and its draft model, grouped by vLLM's own planner."""

from dataclasses import replace

import mlx.core as mx
import pytest
from engine.kv_cache.planned import planned
from pairs import valuewise

from vllm_metal.engine.attention.compressed_layer import RowLayer
from vllm_metal.engine.attention.index_layer import IndexLayer
from vllm_metal.engine.attention.layers import AttentionLayer
from vllm_metal.engine.attention.recurrent_layer import RunLayer
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.specs import (
    allocate_kv_caches,
    block_size_for,
    groups_of,
    kv_cache_specs,
)
from vllm_metal.engine.memory.needs import Needs
from vllm_metal.engine.recurrent.recurrent_state import StateFormat
from vllm_metal.patches.mlx_patches.seam import Compression, GroupChoice

BLOCK = 16
MEMORY = 8 << 20


def layers(prefix, count, kv_heads, head_size, window=None, full_every=1):
    """Every `full_every`th layer is a full one, the others have the window."""
    return [
        AttentionLayer(
            f"{prefix}layers.{index}",
            2 * kv_heads,
            kv_heads,
            head_size,
            None if (index + 1) % full_every == 0 else window,
        )
        for index in range(count)
    ]


#: Latents, and an indexer's keys beside those of every other layer.
SPARSE = [
    layer
    for index in range(4)
    for layer in (
        AttentionLayer(f"layers.{index}.0", 4, 1, 576, None, value_size=512, latent=True, topk=64),
        *([IndexLayer.of(f"layers.{index}.1", 4, 128, 64)] if index % 2 else []),
    )
]
CASES = {
    "latents and index keys": ([*SPARSE, *layers("draft.", 2, 2, 64)], 1),
    "one shape": ([*layers("", 6, 2, 64), *layers("draft.", 2, 2, 64)], 1),
    "two shapes": ([*layers("", 6, 4, 64), *layers("draft.", 3, 2, 64)], 1),
    "same bytes, two shapes": ([*layers("", 6, 4, 32), *layers("draft.", 3, 2, 64)], 1),
    "an odd ratio of bytes": ([*layers("", 4, 5, 64), *layers("draft.", 4, 3, 80)], 1),
    "windows, one shape": ([*layers("", 6, 2, 64, 32, 3), *layers("draft.", 2, 2, 64)], 2),
    "windows, few heads": ([*layers("", 6, 4, 64, 32, 3), *layers("draft.", 4, 1, 64)], 2),
    "windows, two shapes": ([*layers("", 6, 4, 64, 32, 3), *layers("draft.", 4, 1, 80)], 1),
    "windows in both": ([*layers("", 6, 4, 64, 32, 3), *layers("draft.", 6, 1, 64, 32, 3)], 2),
    "two windows": ([*layers("", 4, 2, 64, 32, 9), *layers("draft.", 3, 1, 64, 64, 9)], 2),
}


def heads_of(kv_cache):
    """Which of its storage's heads are a layer's."""
    every = range(kv_cache.storage.keys.elements.shape[0])
    return every[getattr(kv_cache, "heads", slice(None))]


@valuewise(case=list(CASES), dtype=[mx.float32, mx.bfloat16, mx.uint8, mx.int8])
def test_every_layer_gets_its_own_memory_within_the_budget(config, case, dtype):
    found, num_groups = CASES[case]
    specs = kv_cache_specs(found, BLOCK, dtype)
    placed = planned(config, specs, MEMORY)
    kv_caches = allocate_kv_caches(placed, found, BLOCK, dtype, SCATTER)

    assert kv_caches.keys() == {layer.name for layer in found}
    groups = [set(group.layer_names) for group in placed.kv_cache_groups]
    assert len(groups) >= num_groups and (num_groups > 1 or len(groups) == 1)
    for layer in found:
        kv_cache = kv_caches[layer.name]
        shape = kv_cache.keys.elements.shape
        assert shape == (layer.num_kv_heads, placed.num_blocks, BLOCK, layer.head_size)
        parts = (part for part in (kv_cache.keys, kv_cache.values) if part is not None)
        size = sum(array.nbytes for part in parts for array in part.arrays)
        assert size == placed.num_blocks * layer.spec(BLOCK, dtype).page_size_bytes
    for group in groups:  # only layers of different groups may share memory
        assert len({id(kv_caches[name].storage) for name in group}) == len(group)
    group_of = groups_of(placed, found)
    assert group_of.keys() == kv_caches.keys()
    places = [
        (group_of[layer.name], id(kv_caches[layer.name].storage), heads)
        for layer in found
        for heads in heads_of(kv_caches[layer.name])
    ]
    assert len(set(places)) == len(places)
    storages = {id(each.storage): each.storage for each in kv_caches.values()}.values()
    used = sum(array.nbytes for storage in storages for array in storage.arrays)
    assert 0.9 * MEMORY < used <= MEMORY
    # A block is as many tokens everywhere: tables and slots count by one size.
    assert {group.kv_cache_spec.block_size for group in placed.kv_cache_groups} == {BLOCK}


@pytest.mark.parametrize(
    ("dtype", "per_row"), [(mx.float32, 256), (mx.float16, 128), (mx.uint8, 66), (mx.int8, 66)]
)
def test_a_token_takes_its_elements_and_two_bytes_of_scale_where_they_are_codes(dtype, per_row):
    for spec in kv_cache_specs(layers("", 6, 3, 64, 32, 3), BLOCK, dtype).values():
        assert spec.page_size_bytes == BLOCK * 2 * 3 * per_row  # K and V of three heads
    both = [*layers("", 1, 3, 64), IndexLayer.of("layers.0.1", 4, 64, 8)]
    keys = kv_cache_specs(both, BLOCK, dtype)["layers.0.1"]
    assert keys.page_size_bytes == BLOCK * per_row  # K alone, of one head


def test_entries_share_pages_with_rows_of_windows(config):
    """As in DeepSeek V4: the bytes of a token are those of entries alone, in whole pages."""
    found = []
    for index, size in enumerate([4, 128] * 6):
        by = Compression(100, 128, 64, size, size == 4, 8 if size == 4 else None)
        widths = {"keys": 4, "groups": 24 if size == 4 else 8, "entries": 4}
        found += [
            RowLayer.of(f"layers.{index}.{place}", role, by, units * 64)
            for place, (role, units) in enumerate(widths.items())
        ]
    specs = kv_cache_specs(found, BLOCK, mx.bfloat16)
    assert {spec.page_size_bytes for spec in specs.values()} == {BLOCK * 24 * 64 * 2}
    placed = planned(config, specs, 4 * MEMORY)
    layers_of = {}
    for group in placed.kv_cache_groups:
        kind = type(group.kv_cache_spec).__name__
        layers_of.setdefault(kind, []).append(len(group.layer_names))
    assert layers_of == {"FullAttentionSpec": [1], "SlidingWindowSpec": [1] * (2 + 6 + 2)}
    states = allocate_kv_caches(placed, found, BLOCK, mx.bfloat16, SCATTER)
    assert len({state.storage for state in states.values()}) == 1


def test_windows_free_blocks_beside_few_heads_and_states(config):
    """As in Inkling: layers without windows have half of the heads, and all have states."""
    found = []
    for index in range(12):
        heads, window = (2, None) if index % 6 == 5 else (4, 32)
        found.append(AttentionLayer(f"layers.{index}.0", 2 * heads, heads, 64, window))
        found.append(RunLayer(f"layers.{index}.1", StateFormat(((3, 40),), (mx.float32,))))
    specs = kv_cache_specs(found, BLOCK, mx.bfloat16)
    assert {spec.page_size_bytes for spec in specs.values()} == {BLOCK * 2 * 4 * 64 * 2}
    placed = planned(config, specs, MEMORY)
    kinds = {
        type(group.kv_cache_spec).__name__: len(group.layer_names)
        for group in placed.kv_cache_groups
    }
    assert kinds.keys() == {"FullAttentionSpec", "SlidingWindowSpec", "MambaSpec"}
    states = allocate_kv_caches(placed, found, BLOCK, mx.bfloat16, SCATTER)
    assert states.keys() == groups_of(placed, found).keys() == {layer.name for layer in found}
    one, other = states["layers.5.0"], states["layers.11.0"]
    assert one.storage is other.storage and one.heads != other.heads
    storages = {id(each.storage): each.storage for each in states.values()}.values()
    used = sum(array.nbytes for storage in storages for array in storage.arrays)
    assert 0.9 * MEMORY < used <= MEMORY


def auxiliary(found):
    """The layers, as a block drafter has them."""
    return [replace(layer, is_auxiliary=True) for layer in found]


#: Bytes a token of the target's layers and of the drafter's own, from published shapes: the
#: target's (K/V heads, head size, layers), layers with states, the drafter's; windows.
DRAFTERS = {
    "Qwen3.8-27B and DFlash2": ((4, 256, 16, None), 48, (8, 128, 5, 2048)),
    "Qwen3.6-35B-A3B and DFlash": ((2, 256, 10, None), 30, (4, 128, 5, 4096)),
    "Qwen3-8B and DFlash": ((8, 128, 36, None), 0, (8, 128, 5, None)),
    "Gemma 4 31B and DFlash": ((16, 256, 50, 1024), 0, (8, 128, 5, 2048)),
}
STATE = StateFormat(((48, 128, 128), (3, 10240)), (mx.float32, mx.bfloat16))


def per_token(config, found):
    """Bytes of a long context, for each of its tokens, in bfloat16."""
    block_size = block_size_for(found, BLOCK, mx.bfloat16)
    needs = Needs.of(config, kv_cache_specs(found, block_size, mx.bfloat16))
    longer, shorter = 2**18, 2**17
    return (needs(longer) - needs(shorter)) / (longer - shorter)


def test_index_keys_beside_states_add_their_own_bytes(config):
    """In the blocks of the latents, from published shapes of GLM-5.3."""
    choice = GroupChoice(4, 512, lambda rows: rows)
    target, keys = [], []
    for index in range(44):
        name = f"layers.{index}"
        if index % 4 != 3:
            target.append(RunLayer(name, StateFormat(((64, 128, 128),), (mx.float32,))))
            continue
        sizes = 64, 1, 512, None
        target.append(AttentionLayer(f"{name}.0", *sizes, latent=True, topk=choice.num_positions))
        keys.append(IndexLayer.of(f"{name}.1", 32, 256, choice, 128))
    both, alone = per_token(config, [*target, *keys]), per_token(config, target)
    assert both / (alone + len(keys) * 256 * 2) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_a_drafter_adds_its_own_layers_bytes(config, name):
    (heads, size, count, window), num_states, (own_heads, own_size, own_count, own) = DRAFTERS[name]
    target = layers("", count, heads, size, window, full_every=6 if window else 1)
    target += [RunLayer(f"layers.{count + n}", STATE) for n in range(num_states)]
    drafter = auxiliary(layers("draft.", own_count, own_heads, own_size, own, full_every=9))
    both, alone = per_token(config, [*target, *drafter]), per_token(config, target)
    own_bytes = own_count * own_heads * own_size * 2 * mx.bfloat16.size
    assert both / (alone + own_bytes) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", ["states", "windows", "alone"])
def test_guests_lie_in_blocks_of_layers_that_keep_everything(config, name):
    """In memory of their own, within the budget, with tables of a group that frees no block."""
    found = layers("", 4, 2, 64, 32 if name == "windows" else None, 2)
    if name == "states":
        form = StateFormat(((3, 40),), (mx.float32,))
        found += [RunLayer(f"layers.{4 + n}", form) for n in range(8)]
    drafter = auxiliary(layers("draft.", 3, 3, 96, 48, 2))
    dtype = mx.bfloat16
    block_size = block_size_for([*found, *drafter], BLOCK, dtype)
    specs = kv_cache_specs([*found, *drafter], block_size, dtype)
    placed = planned(config, specs, MEMORY)
    pool = [*found, *drafter], block_size, dtype
    kv_caches = allocate_kv_caches(placed, *pool, SCATTER)
    group_of = groups_of(placed, pool[0])
    assert kv_caches.keys() == group_of.keys() == {layer.name for layer in pool[0]}
    assert (len(placed.kv_cache_groups) > 1) == (name != "alone")
    own = [kv_caches[layer.name] for layer in drafter]
    others = {id(kv_caches[layer.name].storage) for layer in found}
    assert len({id(each) for each in own}) == 3 and not others & {id(each) for each in own}
    (group,) = {group_of[layer.name] for layer in drafter}
    members = {layer.name for layer in found if group_of[layer.name] == group}
    assert members and not any(
        layer.window or layer.state_bytes for layer in found if layer.name in members
    )
    storages = {id(each.storage): each.storage for each in kv_caches.values()}.values()
    used = sum(array.nbytes for storage in storages for array in storage.arrays)
    assert 0.8 * MEMORY < used <= MEMORY


def test_guests_need_a_layer_that_keeps_everything(config):
    with pytest.raises(
        NotImplementedError, match="none of its layers attends to the whole context"
    ):
        kv_cache_specs(
            [*layers("", 4, 2, 64, 32, 9), *auxiliary(layers("draft.", 1, 2, 64))], 16, mx.float16
        )
