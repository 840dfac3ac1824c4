# SPDX-License-Identifier: Apache-2.0
"""Both kinds of region hold and answer the same; the kernels' never replaces its arrays."""

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels import interpreter, kernel
from metal_kernels.paged_attention import AttentionShape
from vllm_metal.kv_cache.kernels import KernelRegion
from vllm_metal.kv_cache.region import StepLayout
from vllm_metal.kv_cache.scatter import ScatterRegion

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_size=64, value_size=64)
NUM_BLOCKS = 8


@pytest.fixture(autouse=True)
def interpreted():
    with kernel.using(interpreter.metal_kernel):
        yield


def make(region_type):
    return region_type(NUM_BLOCKS, 16, SHAPE.num_kv_heads, SHAPE.head_size, mx.float32)


def layout(requests):
    """Of (blocks, tokens computed before, rows of this step) for each request."""
    counts = np.array([rows for _, _, rows in requests])
    seq_lens = counts + np.array([before for _, before, _ in requests])
    tables = np.zeros((len(requests), max(len(blocks) for blocks, _, _ in requests)), np.int32)
    slots = []
    for row, (blocks, before, rows) in enumerate(requests):
        tables[row, : len(blocks)] = blocks
        positions = np.arange(before, before + rows)
        slots.append(tables[row, positions // 16] * 16 + positions % 16)
    return StepLayout(
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        seq_lens.astype(np.int32),
        tables,
        np.concatenate(slots).astype(np.int32),
        16,
    )


def step(region, requests, seed, window=None):
    """One layer's step; [T, H, D]."""
    rng, where = np.random.default_rng(seed), layout(requests)
    num_tokens = len(where.slot_mapping_np)

    def rows(heads):
        return mx.array(rng.normal(size=(num_tokens, heads, 64)).astype(np.float32))

    queries, keys, values = rows(4), rows(2), rows(2)
    plan = region.plan(where, SHAPE, window)
    region.begin_step()
    region.write(plan, keys, values)
    return np.array(region.attend(plan, queries, keys, values, 0.1, None))


STEPS = [
    [([3, 1], 0, 20), ([5], 0, 9)],
    [([3, 1], 20, 1), ([5, 2], 9, 12)],
    [([3, 1], 21, 3), ([5, 2], 21, 1), ([3, 6], 16, 1)],  # the third shares a block of the first
    [([7], 0, 1), ([3, 1], 24, 1)],
]


@pytest.mark.parametrize("window", [None, 10])
def test_kernels_answer_as_scatter_does(window):
    ours, other = make(KernelRegion), make(ScatterRegion)
    arrays = ours.keys, ours.values
    for seed, requests in enumerate(STEPS):
        found, wanted = (step(region, requests, seed, window) for region in (ours, other))
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert ours.keys is arrays[0] and ours.values is arrays[1]


@pytest.mark.parametrize("region_type", [KernelRegion, ScatterRegion])
def test_blocks_are_copied_and_cleared(region_type):
    region = make(region_type)
    step(region, STEPS[0], 0)
    region.begin_step()
    before = [np.array(pool) for pool in (region.keys, region.values)]
    region.zero_blocks(np.array([5], np.int32))
    region.copy_blocks(np.array([3, 1], np.int32), np.array([2, 4], np.int32))
    step(region, [([7], 0, 1)], 1)
    region.begin_step()
    for pool, was in zip((region.keys, region.values), before, strict=True):
        now = np.array(pool)
        assert np.abs(was[:, [1, 3, 5], 0]).min() > 0
        np.testing.assert_array_equal(now[:, [2, 4]], was[:, [3, 1]])
        np.testing.assert_array_equal(now[:, [1, 3]], was[:, [1, 3]])
        assert not now[:, 5].any()
