# SPDX-License-Identifier: Apache-2.0
"""Gathered contexts against numpy's indexing and torch's conversions."""

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import valuewise

from metal_kernels import kernel, kv_gather, kv_write
from metal_kernels.kv_gather import reference

F16, BF16, F32, FP8, INT8 = mx.float16, mx.bfloat16, mx.float32, mx.uint8, mx.int8
TORCH = {F16: torch.float16, BF16: torch.bfloat16, F32: torch.float32}
FENCE_BYTES = 32

# Head size, dtypes of the pool and of the context. Each is a kernel to compile; by day those from
# bits, from a float and from each kind of codes.
KINDS = [
    (64, F16, F16),
    (80, FP8, F32),
    (96, BF16, BF16),
    (128, INT8, BF16),
    (192, F32, F32),
    (256, F16, F32),
    (512, F32, F16),
    (576, FP8, F16),
    (48, INT8, F32),
]
OF_EACH_KIND = pytest.mark.parametrize(
    ("head_size", "pool_dtype", "dtype"),
    [
        pytest.param(*kind, marks=() if place in (0, 1, 3, 6) else pytest.mark.more)
        for place, kind in enumerate(KINDS)
    ],
)


@pytest.fixture(autouse=True)
def interpreted():
    with kernel.using(metal_interpreter.metal_kernel):
        yield


def make_scales(rng, shape):
    return mx.array(rng.uniform(0, 2, shape[:3]).astype(np.float32)).astype(mx.bfloat16)


def make_pool(rng, shape, dtype):
    """Makes a pool of any values but NaN, with scales if it is quantized."""
    if dtype == FP8:
        codes = rng.integers(0, 127, shape) + 128 * rng.integers(0, 2, shape)
        return mx.array(codes.astype(np.uint8)), make_scales(rng, shape)
    if dtype == INT8:
        return mx.array(rng.integers(-127, 128, shape).astype(np.int8)), make_scales(rng, shape)
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype), None


def decoded(pool, scales):
    """Decodes the pool to float32."""
    if scales is None:
        return np.array(pool.astype(F32))
    codes = torch.from_numpy(np.array(pool))
    codes = codes.view(torch.float8_e4m3fn) if pool.dtype == FP8 else codes
    return codes.float().numpy() * np.array(scales.astype(F32))[..., None]


def check(pool, scales, table, dtype, bounds=None, heads=None):
    """Checks a gather; tables may name blocks outside the pool."""
    num_heads, num_blocks, _, head_size = pool.shape
    lacking = (table < 0) | (table >= num_blocks)
    wanted = decoded(pool, scales)[:, np.where(lacking, 0, table)]
    wanted[:, lacking] = 0
    wanted = torch.from_numpy(wanted).to(TORCH[dtype]).float().numpy()
    wanted = wanted.reshape(num_heads, len(table), -1, head_size)
    if heads is not None:
        wanted = wanted[heads[0] : sum(heads)]
    if bounds is not None:
        for request, (begin, end) in enumerate(bounds):
            wanted[:, request, :begin], wanted[:, request, end:] = 0, 0
        bounds = mx.array(np.array(bounds, np.int32))
    blocks = mx.array(table.astype(np.int32))
    found, fence = kv_gather.gather(pool, blocks, dtype, scales=scales, bounds=bounds, heads=heads)
    mx.eval(found, fence)
    for context in (found, reference.gather(pool, blocks, dtype, scales, bounds, heads)):
        assert context.dtype == dtype
        np.testing.assert_array_equal(np.array(context.astype(F32)), wanted)


@OF_EACH_KIND
@settings(max_examples=6)
@given(
    heads=st.integers(1, 3),
    table=st.integers(1, 3).flatmap(
        lambda w: st.lists(
            st.lists(st.integers(-1, 5), min_size=w, max_size=w), min_size=1, max_size=4
        )
    ),
    block_size=st.sampled_from([16, 32]),
    seed=st.integers(0, 2**16),
)
def test_contexts_are_the_blocks_in_order(
    head_size, pool_dtype, dtype, heads, table, block_size, seed
):
    rng = np.random.default_rng(seed)
    pool, scales = make_pool(rng, (heads, 5, block_size, head_size), pool_dtype)
    check(pool, scales, np.array(table), dtype)


@OF_EACH_KIND
@settings(max_examples=6)
@given(
    heads=st.integers(0, 2).flatmap(lambda at: st.tuples(st.just(at), st.integers(1, 3 - at))),
    bounds=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 48)), min_size=1, max_size=3),
    nan=st.booleans(),
)
def test_what_is_not_the_requests_reads_as_zeros_whatever_lies_there(
    head_size, pool_dtype, dtype, heads, bounds, nan
):
    rng = np.random.default_rng(0)
    pool, scales = make_pool(rng, (3, 9, 16, head_size), pool_dtype)
    table = np.arange(9).reshape(3, 3)[: len(bounds)]
    bounds = [(begin, max(begin, end)) for begin, end in bounds]
    if nan:  # in every slot that no bounds name
        free = np.ones((9, 16), bool)
        for blocks, (begin, end) in zip(table, bounds, strict=True):
            free[blocks] = ~((np.arange(48) >= begin) & (np.arange(48) < end)).reshape(3, 16)
        spoiled = pool if scales is None else scales
        spoiled[:, mx.array(free.nonzero()[0]), mx.array(free.nonzero()[1])] = mx.nan
    with kernel.using(metal_interpreter.Checker("random:1").metal_kernel):
        check(pool, scales, table, dtype, bounds, heads)


@valuewise(
    schedule=["forward", "reverse", "random:1", "random:2"], kind=[KINDS[1], KINDS[0], KINDS[2]]
)
def test_any_order_of_threads_moves_the_same_and_no_byte_more(kind, schedule):
    head_size, pool_dtype, dtype = kind
    pool, scales = make_pool(np.random.default_rng(0), (2, 5, 16, head_size), pool_dtype)
    checker = metal_interpreter.Checker(schedule=schedule)
    with kernel.using(checker.metal_kernel):
        check(pool, scales, np.array([[1, 4], [2, -1]]), dtype)
    (dispatch,) = checker.dispatches
    in_pool = 3 * pool.nbytes // 5  # of the table's four blocks
    context = 4 * 2 * 16 * head_size * dtype.size
    assert dispatch.buffers["pool"].read_bytes == in_pool
    assert sum(t.written_bytes for t in dispatch.buffers.values()) == context + FENCE_BYTES


@pytest.mark.slow
@pytest.mark.heavy
def test_offsets_beyond_32_bits_are_written_and_read():
    """In a pool of more than 2^32 elements, head 1 starts beyond what 32 bits can count."""
    num_blocks = 2**21
    pool = mx.zeros((2, num_blocks, 16, 80), FP8)
    scales = mx.zeros((2, num_blocks, 16), mx.bfloat16)
    slots = mx.array([0, num_blocks * 16 - 1, num_blocks * 16 - 2], dtype=mx.int32)
    keys = mx.array(np.random.default_rng(0).normal(size=(3, 2, 80)).astype(np.float32))
    written = kv_write.write(keys, None, slots, pool, None, key_scales=scales)
    table = mx.array([[num_blocks - 1, 0]], dtype=mx.int32)
    context, _ = kv_gather.gather(pool, table, F32, after=[written], scales=scales)
    found = np.array(context[:, 0]).swapaxes(0, 1)  # [32, 2, 80]
    wanted = np.zeros_like(found)
    for place, row in ((16, 0), (15, 1), (14, 2)):
        wanted[place] = np.array(keys[row])
    np.testing.assert_allclose(found, wanted, rtol=2**-4, atol=1e-2)
    for place in (14, 15, 16):
        assert np.abs(found[place]).max() > 0.5


def changed(**other):
    arguments = {
        "pool": mx.zeros((2, 3, 16, 64), FP8),
        "block_table": mx.zeros((1, 2), mx.int32),
        "dtype": F16,
        "scales": mx.zeros((2, 3, 16), mx.bfloat16),
    } | other
    return pytest.param(arguments, next(iter(other)), id=next(iter(other)))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        changed(pool=mx.zeros((2, 3, 16), FP8)),
        changed(pool=mx.zeros((2, 3, 16, 64), mx.int32)),
        changed(block_table=mx.zeros(2, mx.int32)),
        changed(block_table=mx.zeros((1, 2), F32)),
        changed(dtype=mx.int8),
        changed(pool=mx.zeros((2, 3, 16, 60), FP8)),
        changed(bounds=mx.zeros((2, 2), mx.int32)),
        changed(bounds=mx.zeros((1, 2), mx.uint32)),
        changed(heads=(1, 2)),
        changed(scales=None),
        changed(scales=mx.zeros((2, 3, 16, 1), mx.bfloat16)),
        changed(scales=mx.zeros((2, 3, 16), F32)),
        changed(scales=mx.zeros((2, 3, 16), mx.bfloat16), pool=mx.zeros((2, 3, 16, 64), F16)),
    ],
)
def test_refuses_what_does_not_fit_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        kv_gather.gather(**arguments)
