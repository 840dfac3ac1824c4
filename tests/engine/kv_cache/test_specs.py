# SPDX-License-Identifier: Apache-2.0
"""Layers of a target and its draft model, grouped and placed by vLLM's own planner."""

import mlx.core as mx
import pytest
from engine.kv_cache.planned import planned
from pairs import valuewise

from vllm_metal.engine.attention.layers import AttentionLayer
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.specs import allocate_kv_caches, kv_cache_specs

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


CASES = {
    "one shape": ([*layers("", 6, 2, 64), *layers("draft.", 2, 2, 64)], 1),
    "two shapes": ([*layers("", 6, 4, 64), *layers("draft.", 3, 2, 64)], 1),
    "same bytes, two shapes": ([*layers("", 6, 4, 32), *layers("draft.", 3, 2, 64)], 1),
    "an odd ratio of bytes": ([*layers("", 4, 5, 64), *layers("draft.", 4, 3, 80)], 1),
    "windows, one shape": ([*layers("", 6, 2, 64, 32, 3), *layers("draft.", 2, 2, 64)], 2),
    "windows, two shapes": ([*layers("", 6, 4, 64, 32, 3), *layers("draft.", 4, 1, 64)], 1),
    "windows in both": ([*layers("", 6, 4, 64, 32, 3), *layers("draft.", 6, 1, 64, 32, 3)], 1),
    "two windows": ([*layers("", 4, 2, 64, 32, 9), *layers("draft.", 2, 1, 64, 64, 9)], 1),
}


@valuewise(case=list(CASES), dtype=[mx.float32, mx.bfloat16, mx.uint8, mx.int8])
def test_every_layer_gets_its_own_memory_within_the_budget(config, case, dtype):
    found, num_groups = CASES[case]
    specs = kv_cache_specs(found, BLOCK, dtype)
    placed = planned(config, specs, MEMORY)
    kv_caches = allocate_kv_caches(placed, found, BLOCK, dtype, SCATTER)

    assert kv_caches.keys() == specs.keys()
    groups = [set(group.layer_names) for group in placed.kv_cache_groups]
    assert len(groups) >= num_groups and (num_groups > 1 or len(groups) == 1)
    for layer in found:
        kv_cache = kv_caches[layer.name]
        shape = kv_cache.keys.elements.shape
        assert shape == (layer.num_kv_heads, placed.num_blocks, BLOCK, layer.head_size)
        size = sum(array.nbytes for array in kv_cache.arrays)
        assert size == placed.num_blocks * specs[layer.name].page_size_bytes
    for group in groups:  # only layers of different groups may share memory
        assert len({id(kv_caches[name]) for name in group}) == len(group)
    used = sum(array.nbytes for kv_cache in set(kv_caches.values()) for array in kv_cache.arrays)
    assert 0.9 * MEMORY < used <= MEMORY
    # A block is as many tokens everywhere: tables and slots count by one size.
    assert {group.kv_cache_spec.block_size for group in placed.kv_cache_groups} == {BLOCK}


@pytest.mark.parametrize(
    ("dtype", "per_row"), [(mx.float32, 256), (mx.float16, 128), (mx.uint8, 66), (mx.int8, 66)]
)
def test_a_token_takes_its_elements_and_two_bytes_of_scale_where_they_are_codes(dtype, per_row):
    for spec in kv_cache_specs(layers("", 6, 3, 64, 32, 3), BLOCK, dtype).values():
        assert spec.page_size_bytes == BLOCK * 2 * 3 * per_row  # K and V of three heads
