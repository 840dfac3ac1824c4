# SPDX-License-Identifier: Apache-2.0
"""Pool bytes of a context, K/V and states, against manual calculation."""

import mlx.core as mx
import numpy as np
import pytest
from engine.kv_cache.planned import planned

from vllm_metal.engine.attention.layers import AttentionLayer, SequenceLayer
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.specs import allocate_kv_caches, block_size_for, kv_cache_specs
from vllm_metal.engine.memory.needs import Needs
from vllm_metal.engine.recurrent.recurrent_state import StateFormat

BF16, F32 = mx.bfloat16, mx.float32
#: Published models: attention layers, their K/V heads and head size; recurrent layers, and a
#: state's parts.
MODELS = {
    "Qwen3-Next-80B-A3B": (12, 2, 256, 36, [((3, 8192), BF16), ((32, 128, 128), F32)]),
    "Falcon-H1-7B": (44, 2, 128, 44, [((3, 3584), BF16), ((24, 128, 256), F32)]),
    "LFM2-1.2B": (6, 8, 64, 10, [((2, 2048), BF16)]),
    "Granite-4.0-H-Small": (4, 8, 128, 36, [((3, 8448), BF16), ((128, 64, 128), F32)]),
}
#: Tokens of a block whose K/V take at least as much as a state.
BLOCKS = {
    "Qwen3-Next-80B-A3B": 1056,
    "Falcon-H1-7B": 3104,
    "LFM2-1.2B": 16,
    "Granite-4.0-H-Small": 1040,
}


def layers_of(name):
    attending, heads, size, with_states, parts = MODELS[name]
    form = StateFormat(*zip(*parts, strict=True))
    where = {round(index) for index in np.linspace(0, attending + with_states - 1, attending)}
    return [
        AttentionLayer(f"layers.{index}", heads * 4, heads, size, None)
        if index in where
        else SequenceLayer(f"layers.{index}", form)
        for index in range(attending + with_states)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_a_context_costs_its_attention_layers_and_its_states(name, config):
    attending, heads, size, with_states, parts = MODELS[name]
    layers = layers_of(name)
    assert sum(isinstance(layer, AttentionLayer) for layer in layers) == attending
    block_size = block_size_for(layers, 16, BF16)
    assert block_size == BLOCKS[name]
    config.cache_config.block_size = block_size
    config.cache_config.mamba_cache_mode = "align"
    specs = kv_cache_specs(layers, block_size, BF16)
    needs = Needs.of(config, specs)
    # Whole blocks; long enough that a request's states, a page each, do not make up most of it.
    tokens = block_size * max(20, 8192 // block_size)
    token = attending * 2 * heads * size * 2
    state = sum(mx.zeros(shape, dtype).nbytes for shape, dtype in parts)
    # A request has the block of its newest state, and the one before while it goes on to the next.
    by_hand = tokens * token + 2 * with_states * state
    taken = needs.blocks(tokens) * needs.block_bytes
    assert by_hand <= taken <= 1.1 * by_hand


def test_the_pool_takes_what_was_planned(config):
    layers = layers_of("Qwen3-Next-80B-A3B")
    block_size = block_size_for(layers, 16, BF16)
    config.cache_config.block_size = block_size
    specs = kv_cache_specs(layers, block_size, BF16)
    memory = 1 << 30
    placed = planned(config, specs, memory)
    states = allocate_kv_caches(placed, layers, block_size, BF16, SCATTER)
    storages = {state.storage for state in states.values()}
    used = sum(array.nbytes for storage in storages for array in storage.arrays)
    assert 0.9 * memory < used <= memory
