# SPDX-License-Identifier: Apache-2.0
"""Blocks leave a pool and enter another bit by bit, and no pool is ever copied for it."""

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from kv_cache.pools import DTYPES, KINDS, bits, built, make

from metal_kernels import kernel
from vllm_metal.kv_cache.scatter import ScatterKVCache


@pytest.fixture(autouse=True)
def interpreted():
    with kernel.using(metal_interpreter.metal_kernel):
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize("kv_cache_type", KINDS.values(), ids=KINDS)
def test_exported_blocks_are_the_pools_bit_by_bit_and_serve_elsewhere(kv_cache_type, window, dtype):
    here, there = make(kv_cache_type, dtype), make(kv_cache_type, dtype)
    mx.async_eval(built(here, [3, 1, 7, 9], 0, 40, window))  # a step in flight, its writes pending
    exported = here.export_blocks(np.array([3, 1, 7], np.int32))
    assert len(exported) == len(here.arrays)
    for copy, array in zip(exported, here.arrays, strict=True):
        assert copy.dtype == array.dtype and copy.shape[0] == 3
        expected = np.stack([bits(array)[:, block] for block in (3, 1, 7)])
        assert expected.any()
        np.testing.assert_array_equal(bits(copy), expected)

    before = [bits(array) for array in there.arrays]
    built(there, [5], 0, 9, window, seed=1)  # written, and not handed to the device yet
    there.import_blocks(np.array([8, 2, 4], np.int32), exported)
    others = [block for block in range(12) if block not in (8, 2, 4, 5)]
    for copy, array, was in zip(exported, there.arrays, before, strict=True):
        np.testing.assert_array_equal(bits(array)[:, [8, 2, 4]].swapaxes(0, 1), bits(copy))
        np.testing.assert_array_equal(bits(array)[:, others], was[:, others])
    assert bits(there.arrays[0])[:, 5].any()
    answers = [
        np.array(built(kv_cache, blocks, 40, 5, window).astype(mx.float32))
        for kv_cache, blocks in ((here, [3, 1, 7, 9]), (there, [8, 2, 4, 6]))
    ]
    np.testing.assert_array_equal(*answers)


@pytest.mark.parametrize("kv_cache_type", KINDS.values(), ids=KINDS)
def test_exports_stay_as_they_are_while_steps_go_on(kv_cache_type):
    kv_cache = make(kv_cache_type, mx.float32)
    mx.eval(built(kv_cache, [3, 1], 0, 20))
    exported = kv_cache.export_blocks(np.array([1], np.int32))
    was = [np.array(copy) for copy in exported]
    for before in range(20, 26):
        mx.eval(built(kv_cache, [3, 1], before, 1))
    kv_cache.settle()
    assert not np.array_equal(np.array(kv_cache.arrays[0])[:, 1], was[0][0])
    for copy, array in zip(exported, was, strict=True):
        np.testing.assert_array_equal(np.array(copy), array)


@pytest.mark.parametrize("dtype", [mx.float16, mx.uint8], ids=str)
@pytest.mark.parametrize("kv_cache_type", KINDS.values(), ids=KINDS)
def test_moving_blocks_never_copies_the_pool(kv_cache_type, dtype):
    """Between steps, each with a step in flight that reads the pool, and with writes pending."""
    kv_cache = make(kv_cache_type, dtype, num_blocks=8192 // dtype.size)
    mx.eval(kv_cache.arrays)
    one_array = kv_cache.arrays[0].nbytes
    blocks, others = np.array([3, 1], np.int32), np.array([6, 2], np.int32)
    mx.eval(built(kv_cache, [3, 1, 7], 0, 20))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    exported = kv_cache.export_blocks(blocks)
    for start in range(20, 32, 4):
        mx.async_eval(built(kv_cache, [3, 1, 7], start, 1))
        kv_cache.begin_step()
        kv_cache.copy_blocks(blocks, others)
        mx.async_eval(built(kv_cache, [3, 1, 7], start + 1, 1))
        kv_cache.begin_step()
        kv_cache.clear_blocks(others)
        mx.async_eval(built(kv_cache, [3, 1, 7], start + 2, 1))
        exported = kv_cache.export_blocks(blocks)
        mx.async_eval(built(kv_cache, [3, 1, 7], start + 3, 1))
        kv_cache.import_blocks(others, exported)
    mx.synchronize()
    assert mx.get_peak_memory() - before < one_array / 4


def test_blocks_of_another_pool_are_refused_by_what_they_are():
    exported = make(ScatterKVCache, mx.int8).export_blocks(np.array([1], np.int32))
    for other in (make(ScatterKVCache, mx.uint8), make(ScatterKVCache, mx.float16)):
        with pytest.raises(ValueError, match=r"arrays: expected .* as exported, found"):
            other.import_blocks(np.array([2], np.int32), exported)
    with pytest.raises(ValueError, match="arrays: expected"):
        make(ScatterKVCache, mx.int8).import_blocks(np.array([2, 3], np.int32), exported)
