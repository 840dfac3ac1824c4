# SPDX-License-Identifier: Apache-2.0
"""Blocks pinned for other engines in vLLM's block pool."""

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from vllm_metal.kv_transfer.pins import Pins
from vllm_metal.kv_transfer.shared_pool import PinChanges

NUM_BLOCKS = 17  # vLLM keeps one for itself


@pytest.fixture
def pool():
    return BlockPool(NUM_BLOCKS, True, 16)


def keys_of(pool, number):
    """Caches blocks that no request holds; returns their keys."""
    blocks = pool.get_new_blocks(number)
    keys = [make_block_hash_with_group_id(BlockHash(bytes([n]) * 32), 0) for n in range(number)]
    for key, block in zip(keys, blocks, strict=True):
        pool._insert_block_hash(key, block, 16)
    pool.free_blocks(blocks)
    return keys


def test_a_block_stays_while_it_is_pinned(pool):
    pins, keys = Pins(pool), keys_of(pool, 4)
    pins.change(PinChanges((keys[0], keys[1], b"unknown"), ()))
    assert len(pins) == 2
    pool.free_blocks(pool.get_new_blocks(14))  # all others are written to
    found = [pool.cached_block_hash_to_block.get_one_block(key) for key in keys]
    assert [block is not None for block in found] == [True, True, False, False]
    assert not pool.reset_prefix_cache()
    pins.change(PinChanges((), tuple(keys)))
    assert len(pins) == 0 and pool.reset_prefix_cache()


def test_pins_take_a_quarter_of_what_is_free_and_make_way(pool):
    pins, keys = Pins(pool), keys_of(pool, 8)
    pins.change(PinChanges(tuple(keys), ()))
    assert len(pins) == 4
    held = pool.get_new_blocks(8)  # free: 4, and 4 pinned
    pins.free_excess()
    assert len(pins) == 2
    pool.free_blocks(held)
    pins.free_excess()
    assert len(pins) == 2
    pins.release_all()
    assert len(pins) == 0 and pool.get_num_free_blocks() == NUM_BLOCKS - 1


def test_a_block_that_is_pinned_twice_is_held_once(pool):
    pins, keys = Pins(pool), keys_of(pool, 1)
    for _ in range(2):
        pins.change(PinChanges(tuple(keys), ()))
    pins.change(PinChanges((), tuple(keys)))
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1
