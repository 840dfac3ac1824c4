# SPDX-License-Identifier: Apache-2.0
"""Block copies and clears against numpy's indexing."""

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metal_kernels import kernel, kv_blocks
from metal_kernels.kv_blocks import reference

# The rest of a pool's shape [Hkv, B, ...] and its dtype. Each is two kernels to compile.
KINDS = [
    ((16, 64), mx.float16),
    ((32, 80), mx.bfloat16),
    ((16, 576), mx.float32),
    ((16, 96), mx.uint8),
    ((32, 7), mx.int8),
    ((16,), mx.float32),
    ((5,), mx.float32),
]
FENCE_BYTES = 32
SLOW = pytest.mark.slow
#: Some of KINDS, and all of them.
OF_KINDS = pytest.mark.parametrize(
    "some", [[KINDS[0], KINDS[4], KINDS[6]], pytest.param(KINDS, marks=pytest.mark.more)], ids=len
)


@pytest.fixture(autouse=True)
def interpreted():
    with kernel.using(metal_interpreter.metal_kernel):
        yield


def make_pools(kinds, heads, num_blocks, seed):
    rng = np.random.default_rng(seed)
    return [
        mx.array(rng.integers(1, 100, (heads, num_blocks, *rest)).astype(np.float32)).astype(dtype)
        for rest, dtype in kinds
    ]


def contents(pools):
    return [np.array(pool.astype(mx.float32)) for pool in pools]


def assert_all_equal(pools, wanted):
    for pool, values in zip(contents(pools), wanted, strict=True):
        np.testing.assert_array_equal(pool, values)


def check_copy(pools, sources, targets):
    wanted = contents(pools)
    for values in wanted:
        values[:, targets] = values[:, sources]
    assert_all_equal(reference.copy(pools, sources, targets), wanted)
    mx.eval(kv_blocks.copy(pools, sources, targets))
    assert_all_equal(pools, wanted)


def check_zero(pools, blocks):
    wanted = contents(pools)
    for values in wanted:
        values[:, blocks] = 0
    assert_all_equal(reference.zero(pools, blocks), wanted)
    mx.eval(kv_blocks.zero(pools, blocks))
    assert_all_equal(pools, wanted)


@OF_KINDS
@settings(max_examples=15)
@given(
    kinds=st.data(),
    heads=st.integers(1, 4),
    order=st.permutations(range(9)),
    pairs=st.lists(st.integers(0, 3), max_size=5),
    seed=st.integers(0, 2**16),
)
def test_targets_become_the_sources_and_nothing_else_changes(
    some, kinds, heads, order, pairs, seed
):
    kinds = kinds.draw(st.lists(st.sampled_from(some), min_size=1, max_size=3))
    sources, targets = np.array(order)[pairs], np.array(order)[4 : 4 + len(pairs)]
    check_copy(make_pools(kinds, heads, 9, seed), sources, targets)


@OF_KINDS
@settings(max_examples=10)
@given(
    kinds=st.data(),
    heads=st.integers(1, 4),
    blocks=st.lists(st.integers(0, 8), max_size=5),
    seed=st.integers(0, 2**16),
)
def test_blocks_are_cleared_and_nothing_else_changes(some, kinds, heads, blocks, seed):
    kinds = kinds.draw(st.lists(st.sampled_from(some), min_size=1, max_size=3))
    check_zero(make_pools(kinds, heads, 9, seed), np.array(blocks, np.int64))


@pytest.mark.parametrize(
    "schedule",
    ["reverse", *(pytest.param(s, marks=SLOW) for s in ("forward", "random:1", "random:2"))],
)
def test_any_order_of_threads_moves_the_same_and_no_byte_more(schedule):
    checker = metal_interpreter.Checker(schedule=schedule)
    pools = make_pools(KINDS[:1] + KINDS[-1:], heads=2, num_blocks=9, seed=0)
    with kernel.using(checker.metal_kernel):
        check_copy(pools, np.array([0, 3, 3]), np.array([5, 1, 2]))
        check_zero(pools, np.array([4, 5]))
    of_each = [pool.nbytes // 9 for pool in pools]  # a block, all heads
    found = [
        (d.buffers["pool"].read_bytes, sum(t.written_bytes for t in d.buffers.values()))
        for d in checker.dispatches
    ]
    copies = [(3 * block, 3 * block + FENCE_BYTES) for block in of_each]
    assert found == copies + [(0, 2 * block + FENCE_BYTES) for block in of_each]


@pytest.mark.parametrize(
    ("sources", "targets", "message"),
    [
        ([0, 1], [2, 2], "targets: a block is named twice"),
        ([0, 1], [2, 1], "targets: block 1 is also one of sources"),
        ([0, 9], [2, 1], "sources: block 9 is not one of the pool's 9"),
        ([0, 1], [2, -1], "targets: block -1 is not one of the pool's 9"),
        ([0, 1], [2], "targets: expected 2 as sources, found 1"),
        ([[0]], [1], "sources: expected a flat array of integers"),
        ([0.5], [1], "sources: expected a flat array of integers"),
    ],
)
def test_refuses_copies_whose_order_would_matter_or_that_leave_the_pool(sources, targets, message):
    pools = make_pools(KINDS[:1], heads=1, num_blocks=9, seed=0)
    with pytest.raises(ValueError, match=message):
        kv_blocks.copy(pools, np.array(sources), np.array(targets))


def test_refuses_to_clear_blocks_the_smallest_pool_lacks():
    pools = make_pools(KINDS[:1], 1, 9, 0) + make_pools(KINDS[:1], 1, 4, 0)
    with pytest.raises(ValueError, match="blocks: block 4 is not one of the pool's 4"):
        kv_blocks.zero(pools, np.array([4]))
