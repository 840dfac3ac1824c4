# SPDX-License-Identifier: Apache-2.0
"""Both kinds of KV cache store and compute the same; kernels never replace arrays."""

import functools

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from engine.kv_cache.layouts import layout_of
from pairs import valuewise

from metal_kernels import kernel, paged_attention
from metal_kernels.pace import Pace
from metal_kernels.paged_attention import AttentionShape
from tests.metal_kernels.hazards import Logger, prove_always
from vllm_metal.engine.kv_cache import kernels
from vllm_metal.engine.kv_cache.gathered import ByMLX
from vllm_metal.engine.kv_cache.kernels import KERNELS, KernelBackend
from vllm_metal.engine.kv_cache.layer_cache import AttentionKind, KVShape
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.patches.mlx_patches.seam import Scoring

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_size=64, value_size=64)
NUM_BLOCKS = 8
DTYPES = [mx.float32, mx.uint8, mx.int8]


@pytest.fixture(autouse=True)
def interpreted():
    with kernel.using(metal_interpreter.metal_kernel):
        yield


def make(backend, dtype=mx.float32):
    return backend.allocate(NUM_BLOCKS, 16, KVShape(2, 64, 64), dtype)


def layout(requests):
    """Lays out (blocks, tokens computed before, rows of this step) per request."""
    return layout_of(requests, pace=Pace())


def step(kv_cache, requests, seed, window=None):
    """Returns one layer's [T, H, D] results of a step."""
    rng, where = np.random.default_rng(seed), layout(requests)
    num_tokens = len(where.slot_mapping_np)

    def rows(heads):
        return mx.array(rng.normal(size=(num_tokens, heads, 64)).astype(np.float32))

    queries, keys, values = rows(4), rows(2), rows(2)
    return attended(kv_cache, where, queries, keys, values, window)


def attended(kv_cache, where, queries, keys, values, window=None):
    """Returns the [T, H, D] results."""
    plan = kv_cache.backend.plan(where, AttentionKind(SHAPE, window))
    kv_cache.begin_step()
    kv_cache.write(plan, keys, values)
    return np.array(kv_cache.attend(plan, queries, Scoring(0.1)))


STEPS = [
    [([3, 1], 0, 20), ([5], 0, 9)],
    [([3, 1], 20, 1), ([5, 2], 9, 12)],
    [([3, 1], 21, 3), ([5, 2], 21, 1), ([3, 6], 16, 1)],  # the third shares a block of the first
    [([7], 0, 1), ([3, 1], 24, 1)],
]


BY_MLX = {  # MLX attends to what a kernel gathers: to all rows, or to prompts alone
    name: KernelBackend(
        by_mlx=dict.fromkeys([(SHAPE, None), (SHAPE, 10)], ByMLX(decodes, {1024: 17}))
    )
    for name, decodes in (("all", True), ("prompts", False))
}


@valuewise(dtype=DTYPES, window=[None, 10], rows=list(BY_MLX))
def test_gathered_rows_answer_as_scatter_does_and_are_read_in_order(rows, window, dtype):
    ours, other = make(BY_MLX[rows], dtype), make(SCATTER, dtype)
    arrays = ours.arrays
    logger = Logger(metal_interpreter.metal_kernel)
    with kernel.using(logger.metal_kernel):
        for seed, requests in enumerate(STEPS):
            found, wanted = (step(kv_cache, requests, seed, window) for kv_cache in (ours, other))
            np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert all(now is then for now, then in zip(ours.arrays, arrays, strict=True))
    assert prove_always(logger.log) == []


@valuewise(dtype=DTYPES, window=[None, 10])
def test_kernels_answer_as_scatter_does_and_hold_the_same(window, dtype):
    ours, other = make(KERNELS, dtype), make(SCATTER, dtype)
    arrays = ours.arrays
    assert len(arrays) == (2 if dtype == mx.float32 else 4)
    for seed, requests in enumerate(STEPS):
        found, wanted = (step(kv_cache, requests, seed, window) for kv_cache in (ours, other))
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    other.begin_step()
    assert all(now is then for now, then in zip(ours.arrays, arrays, strict=True))
    assert all(mx.array_equal(*pair) for pair in zip(ours.arrays, other.arrays, strict=True))


def test_queries_may_come_in_float32():
    """phi and stablelm pass float32; results have their dtype."""
    rng, where = np.random.default_rng(0), layout(STEPS[0])
    heads = ((4, mx.float32), (2, mx.float16), (2, mx.float16))
    rows = [mx.array(rng.normal(size=(29, num, 64))).astype(dtype) for num, dtype in heads]
    found, wanted = (
        attended(make(backend, mx.float16), where, *rows) for backend in (KERNELS, SCATTER)
    )
    assert found.dtype == wanted.dtype == np.float32
    np.testing.assert_allclose(found, wanted, atol=2e-3)  # queries are rounded to 11 bits


def test_writes_and_reads_are_in_order_whatever_their_number():
    """Two writes in a row, two reads of one, and whole blocks between, by fences alone."""
    logger = Logger(metal_interpreter.metal_kernel)
    with kernel.using(logger.metal_kernel):
        kv_cache = make(KERNELS)
        for requests, reads in ((STEPS[0], 0), (STEPS[1], 2), (STEPS[2], 0), (STEPS[3], 1)):
            where = layout(requests)
            plan = kv_cache.backend.plan(where, AttentionKind(SHAPE, None))
            rows = [mx.ones((len(where.slot_mapping_np), heads, 64)) for heads in (4, 2, 2)]
            kv_cache.write(plan, *rows[1:])
            for _ in range(reads):
                kv_cache.attend(plan, rows[0], Scoring(0.1))
        kv_cache.copy_blocks(np.array([3]), np.array([4]))
        kv_cache.clear_blocks(np.array([5]))
        attended(kv_cache, where, *rows)
    assert sum(dispatch.name == "kv_write" for dispatch in logger.log) == 5
    assert prove_always(logger.log) == []


def test_a_drafted_block_and_the_step_that_verifies_it_are_planned_once():
    where, causal = layout([([0, 1], 3, 5), ([2, 3], 9, 5)]), AttentionKind(SHAPE, None)
    block = KERNELS.plan(where, causal._replace(bidirectional=True)).attention
    verified = KERNELS.plan(where, causal).attention
    assert verified.block_tables is block.block_tables
    pairs = list(zip(verified.dispatches, block.dispatches, strict=True))
    assert all(one.tiles is other.tiles for one, other in pairs)
    assert (verified.bidirectional, block.bidirectional) == (False, True)
    windowed = KERNELS.plan(where, causal._replace(window=4)).attention
    assert windowed.block_tables is not block.block_tables
    assert layout([([0], 3, 5)]).attention == where.cut_at(np.array([2])).attention == {}


def test_work_spread_over_dispatches_answers_the_same_in_order(monkeypatch):
    """One tile a dispatch, each in its own command buffer."""
    steps = [[([3, 1, 6, 7], 0, 60), ([5], 0, 9)], [([3, 1, 6, 7], 60, 1), ([5, 2], 9, 12)]]
    ends = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: ends.append(mx.eval(*arrays)))
    together = make(KERNELS)
    whole = [step(together, requests, seed) for seed, requests in enumerate(steps)]
    assert not ends
    spread = functools.partial(paged_attention.plan, most_work=1)
    monkeypatch.setattr(paged_attention, "plan", spread)
    monkeypatch.setattr(kernels, "pace_of", lambda pace, rows, work: Pace(most_work=1))
    logger, apart = Logger(metal_interpreter.metal_kernel), make(KERNELS)
    with kernel.using(logger.metal_kernel):
        found = [step(apart, requests, seed) for seed, requests in enumerate(steps)]
    np.testing.assert_allclose(np.concatenate(found), np.concatenate(whole), atol=1e-6)
    reads = [dispatch for dispatch in logger.log if dispatch.name in ("decode", "prefill")]
    # Two tiles of 32 rows and one of 9; one of one row and one of 12. The last is ended by a read.
    assert len(reads) == len(ends) == 5
    assert prove_always(logger.log) == []


@valuewise(dtype=DTYPES, backend=[KERNELS, SCATTER])
def test_a_row_counts_the_same_in_its_own_step_and_from_the_pool(backend, dtype):
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-3, 0, (40, 1, 1))  # so that scales differ
    queries = mx.array(rng.normal(size=(40, 4, 64)).astype(np.float32))
    keys, values = mx.array((rng.normal(size=(2, 40, 2, 64)) * sizes).astype(np.float32))

    def answers(*chunks):
        kv_cache, out, start = make(backend, dtype), [], 0
        for chunk in chunks:
            rows = slice(start, start + chunk)
            where = layout([([3, 1, 6], start, chunk)])
            out.append(attended(kv_cache, where, queries[rows], keys[rows], values[rows]))
            start += chunk
        return np.concatenate(out)

    together = answers(40)
    for chunks in ((16, 24), (30, 1, 1, 8)):
        np.testing.assert_allclose(answers(*chunks), together, atol=1e-5)


@valuewise(
    dtype=DTYPES,
    backend=[
        SCATTER,
        KERNELS,
        KernelBackend(moves_blocks=False),
    ],
)
def test_blocks_are_copied_and_cleared(backend, dtype):
    kv_cache = make(backend, dtype)
    step(kv_cache, STEPS[0], 0)
    kv_cache.begin_step()
    before = [np.array(array.astype(mx.float32)) for array in kv_cache.arrays]
    kv_cache.clear_blocks(np.array([5], np.int32))
    kv_cache.copy_blocks(np.array([3, 1], np.int32), np.array([2, 4], np.int32))
    step(kv_cache, [([7], 0, 1)], 1)
    kv_cache.begin_step()
    for array, was in zip(kv_cache.arrays, before, strict=True):
        now = np.array(array.astype(mx.float32))
        assert all(was[:, block].any() for block in (1, 3, 5))
        np.testing.assert_array_equal(now[:, [2, 4]], was[:, [3, 1]])
        np.testing.assert_array_equal(now[:, [1, 3]], was[:, [1, 3]])
        assert not now[:, 5].any()
