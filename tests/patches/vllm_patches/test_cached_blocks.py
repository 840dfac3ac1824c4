# SPDX-License-Identifier: Apache-2.0
"""Recorded changes of a prefix cache add up to the contents of vLLM's pool."""

import random

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from vllm_metal.patches.vllm_patches.cached_blocks import CachedBlocks


def key_of(number):
    return make_block_hash_with_group_id(BlockHash(bytes([number]) * 32), number % 2)


def test_changes_add_up_to_what_the_pool_has():
    """Has two blocks with one key, blocks that change owners, and resets."""
    rng, pool = random.Random(8), BlockPool(20, True, 16)
    blocks, known, held = CachedBlocks(pool), {}, []
    for _ in range(400):
        for _ in range(rng.randrange(4)):
            if held and rng.random() < 0.6:
                pool.free_blocks([held.pop(rng.randrange(len(held)))])
            elif pool.get_num_free_blocks():
                (block,) = pool.get_new_blocks(1)
                held.append(block)
                if rng.random() < 0.9:
                    pool._insert_block_hash(key_of(rng.randrange(12)), block, 16)
        if rng.random() < 0.05:
            pool.free_blocks(held)
            held.clear()
            assert pool.reset_prefix_cache()
        changes = blocks.take()
        if changes is None:
            continue
        if changes.is_all:
            known.clear()
        assert not changes.added.keys() & set(changes.removed)
        known = {key: n for key, n in known.items() if key not in changes.removed} | changes.added
        there = pool.cached_block_hash_to_block
        assert set(known) == {key for key in map(key_of, range(12)) if there.get_one_block(key)}
        for key, block in known.items():
            assert there.contain(key, block)
    assert blocks.take() is None


def test_the_first_changes_are_all_there_is():
    pool = BlockPool(4, True, 16)
    (block,) = pool.get_new_blocks(1)
    pool._insert_block_hash(key_of(1), block, 16)
    blocks = CachedBlocks(pool)
    changes = blocks.take()
    assert changes.is_all and changes.added == {key_of(1): block.block_id}
    assert blocks.take() is None
