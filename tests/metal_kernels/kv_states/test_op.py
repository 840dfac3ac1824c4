# SPDX-License-Identifier: Apache-2.0
"""States in blocks against numpy's indexing."""

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import valuewise

from metal_kernels import kernel, kv_states
from metal_kernels.kv_states import reference

NUM_BLOCKS = 7
FENCE_BYTES = 32
# A block's shape in one head of each pool, the parts of a block, and the dtype. Each is a kernel.
KINDS = [
    (((16, 8), (16, 8)), 1, mx.bfloat16),
    (((16, 12), (16, 4)), 3, mx.float32),
    (((16, 24),), 2, mx.float16),
    (((16, 16), (16, 16)), 1, mx.int8),
    (((16, 5), (16, 5)), 2, mx.uint8),
]
#: Some of KINDS, and all of them.
OF_KINDS = pytest.mark.parametrize(
    "some", [[KINDS[1], KINDS[3]], pytest.param(KINDS, marks=pytest.mark.more)], ids=len
)
CODES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@pytest.fixture(autouse=True)
def interpreted():
    with kernel.using(metal_interpreter.metal_kernel):
        yield


def make_pools(kind, heads, rng):
    """Makes pools of random bits, including NaN."""
    parts, split, dtype = kind
    unsigned = CODES[dtype.size]
    most = np.iinfo(unsigned).max
    return [
        mx.array(
            rng.integers(0, most, (heads, NUM_BLOCKS * split, *part), unsigned, endpoint=True)
        ).view(dtype)
        for part in parts
    ]


def codes(pool):
    return np.array(pool.view({1: mx.uint8, 2: mx.uint16, 4: mx.uint32}[pool.dtype.size]))


def blocks_of(pool, split):
    """Returns [B, elements of all heads]."""
    array = codes(pool)
    heads = len(array)
    return array.reshape(heads, NUM_BLOCKS, -1).swapaxes(0, 1).reshape(NUM_BLOCKS, -1)


def room_of(kind, heads):
    parts, split, _ = kind
    return sum(heads * split * int(np.prod(part)) for part in parts)


@OF_KINDS
@settings(max_examples=20)
@given(
    kind=st.data(),
    heads=st.integers(1, 3),
    share=st.floats(0.0, 1.0),
    blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
)
def test_reads_what_the_blocks_hold(some, kind, heads, share, blocks, seed):
    kind = kind.draw(st.sampled_from(some))
    pools = make_pools(kind, heads, np.random.default_rng(seed))
    width = max(8, int(room_of(kind, heads) * share))
    wanted = np.concatenate([blocks_of(pool, kind[1]) for pool in pools], axis=1)[blocks, :width]
    found, _ = kv_states.read(pools, mx.array(blocks, mx.int32), width, kind[1])
    np.testing.assert_array_equal(np.array(found), wanted)
    found = reference.read(pools, mx.array(blocks, mx.int32), width, kind[1])
    np.testing.assert_array_equal(np.array(found), wanted)


@OF_KINDS
@settings(max_examples=20)
@given(
    kind=st.data(),
    heads=st.integers(1, 3),
    share=st.floats(0.0, 1.0),
    order=st.permutations(range(NUM_BLOCKS)),
    count=st.integers(0, 6),
    seed=st.integers(0, 2**16),
)
def test_writes_states_and_zeros_behind_them_and_nothing_else(
    some, kind, heads, share, order, count, seed
):
    kind = kind.draw(st.sampled_from(some))
    rng = np.random.default_rng(seed)
    pools = make_pools(kind, heads, rng)
    width = max(8, int(room_of(kind, heads) * share))
    unsigned = CODES[kind[2].size]
    states = rng.integers(0, np.iinfo(unsigned).max, (count, width), unsigned, endpoint=True)
    blocks_np = np.array(order[:count], np.int64)

    before = [blocks_of(pool, kind[1]) for pool in pools]
    wanted, start = [], 0
    for array in before:
        of_pool = array.copy()
        if start < width:
            part = states[:, start : start + array.shape[1]]
            of_pool[blocks_np] = np.pad(part, [(0, 0), (0, array.shape[1] - part.shape[1])])
        wanted.append(of_pool)
        start += array.shape[1]
    by_mlx = [mx.array(pool) for pool in pools]
    reference.write(by_mlx, blocks_np, mx.array(states), kind[1])
    mx.eval(kv_states.write(pools, blocks_np, mx.array(states), kind[1]))
    for found in (pools, by_mlx):
        for pool, of_pool in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(blocks_of(pool, kind[1]), of_pool)


@valuewise(count=[1, 5], schedule=["reverse", "random:1", "forward", "random:2"])
def test_one_dispatch_moves_all_states_and_no_byte_more(schedule, count):
    checker = metal_interpreter.Checker(schedule=schedule)
    kind = KINDS[1]
    pools = make_pools(kind, 2, np.random.default_rng(0))
    width = 2 * 3 * 16 * 12 + 8  # all of K, and two runs of four elements of V
    room = room_of(kind, 2)
    blocks_np = np.array([5, 1, 2, 0, 6])[:count]
    with kernel.using(checker.metal_kernel):
        states, fence = kv_states.read(pools, mx.array(blocks_np.astype(np.int32)), width, kind[1])
        mx.eval(kv_states.write(pools, blocks_np, states + 1, kind[1], [fence]))
    read, write = checker.dispatches
    sizes = read.buffers["key_pool"].read_bytes + read.buffers["value_pool"].read_bytes
    assert sizes == 4 * width * count
    assert read.buffers["states"].written_bytes == 4 * width * count
    assert read.buffers["key_pool"].written_bytes == 0
    written = [write.buffers[name].written_bytes for name in ("key_pool", "value_pool")]
    assert sum(written) == 4 * room * count
    assert write.buffers["states"].read_bytes == 4 * width * count
    assert write.buffers["key_pool"].read_bytes == 0
    assert write.buffers["fence"].written_bytes == FENCE_BYTES


@pytest.mark.parametrize(
    ("blocks", "width", "message"),
    [
        ([1, 1], 8, "blocks_np: a block is named twice"),
        ([1, 7], 8, "blocks_np: block 7 is not one of the pool's 7"),
        ([-1, 0], 8, "blocks_np: block -1 is not one of the pool's 7"),
        ([1], 8, r"states: expected \[1, width\], found \(2, 8\)"),
        ([0, 1], 7, "width: expected 8 to 256 elements, which a block has, found 7"),
        ([0, 1], 257, "width: expected 8 to 256 elements, which a block has, found 257"),
    ],
)
def test_refuses_what_does_not_fit(blocks, width, message):
    pools = make_pools(KINDS[0], 1, np.random.default_rng(0))
    with pytest.raises(ValueError, match=message):
        kv_states.write(pools, np.array(blocks), mx.zeros((2, width), mx.uint16))


def test_refuses_pools_that_differ_and_states_of_another_size():
    keys, values = make_pools(KINDS[0], 1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="alike in dtype, Hkv and B"):
        kv_states.read([keys, values.astype(mx.float32)], mx.array([0]), 8)
    with pytest.raises(ValueError, match=r"blocks: expected \[n\] int32"):
        kv_states.read([keys, values], mx.array([0.0]), 8)
    with pytest.raises(ValueError, match=r"unsigned integers of the size of .*bfloat16"):
        kv_states.write([keys], np.array([0]), mx.zeros((1, 8), mx.uint32))
