# SPDX-License-Identifier: Apache-2.0
"""Rows that attend over gathered contexts; stale pool data has no effect."""

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from engine.kv_cache.layouts import layout_of
from pairs import valuewise

from metal_kernels import kernel, kv_gather
from metal_kernels.layout import PositionLag
from metal_kernels.pace import Pace
from metal_kernels.paged_attention import AttentionShape, prompts
from tests.metal_kernels.hazards import Logger, prove_always
from tests.metal_kernels.paged_attention.whole_tiles import WholeTiles
from vllm_metal.engine.kv_cache import gathered
from vllm_metal.engine.kv_cache.gathered import ByMLX
from vllm_metal.engine.kv_cache.kernels import KernelBackend
from vllm_metal.engine.kv_cache.layer_cache import AttentionKind, KVShape
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.patches.mlx_patches.seam import Scoring

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_size=64, value_size=64)
WINDOW = 20
BLOCKS = 16
KINDS = [AttentionKind(SHAPE, None), AttentionKind(SHAPE, WINDOW)]


@pytest.fixture(autouse=True)
def interpreted():
    with kernel.using(metal_interpreter.metal_kernel):
        yield


def serving(by_mlx: ByMLX) -> KernelBackend:
    return KernelBackend(by_mlx=dict.fromkeys(KINDS, by_mlx))


@pytest.mark.parametrize(
    ("by_mlx", "served"),
    [
        (ByMLX(), ()),
        (ByMLX(True), ((1, 50), (16, 9000))),
        (ByMLX(prompts={1: 64}), ((64, 64), (64, 90000), (3000, 3000))),
        (ByMLX(prompts={1: 1}), ((17, 50), (64, 64), (64, 90000), (3000, 3000))),
        (ByMLX(prompts={1024: 3000, 8192: None, 32768: 64}), ((64, 90000),)),
        (ByMLX(prompts={1024: None}), ()),
        (ByMLX(True, {4096: 100}), ((1, 50), (16, 9000), (3000, 3000))),
    ],
)
def test_requests_go_by_their_rows_and_context(by_mlx, served):
    every = [(1, 50), (16, 9000), (17, 50), (64, 64), (64, 90000), (3000, 3000)]
    rows, lens = np.array(every, np.int32).T
    found = by_mlx.serves(rows, lens)
    assert tuple(one for one, by in zip(every, found, strict=True) if by) == served
    assert bool(by_mlx) == (by_mlx not in (ByMLX(), ByMLX(prompts={1024: None})))


def test_lengths_that_the_device_alone_knows_stay_with_the_kernels():
    layout = layout_of(
        [([1, 2, 3, 4, 5], 0, 70), ([6, 7, 8, 9, 10], 0, 70)],
        lag=PositionLag(mx.array([0, 1], mx.int32), np.array([0, 2], np.int32)),
    )
    assert gathered.select(layout, ByMLX(True, {1: 64})).tolist() == [True, False]


STEPS = [
    [([3, 1, 7, 9, 14], 0, 70), ([5], 0, 9)],
    [([5, 2], 9, 1), ([3, 1, 7, 9, 14], 70, 8)],
    [([3, 1, 7, 9, 14, 11, 4, 15, 12], 78, 65), ([5, 2], 10, 18), ([6], 0, 1)],
]


@valuewise(
    by_mlx=[ByMLX(prompts={1: 64}), ByMLX(), ByMLX(True, {1: 17})],
    kind=[KINDS[1], KINDS[0]],
    dtype=[mx.float32, mx.uint8, mx.int8],
)
def test_nan_in_what_is_nobodys_changes_no_output(monkeypatch, by_mlx, kind, dtype):
    """NaN in free slots, freed blocks and beyond windows; MLX reads whole tiles."""
    shape = KVShape(2, 64, 64)
    clean = SCATTER.allocate(BLOCKS, 16, shape, dtype)
    ours = serving(by_mlx).allocate(BLOCKS, 16, shape, dtype)
    wanted = [attended(clean, kind, seed) for seed in range(len(STEPS))]
    double = WholeTiles()
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", double.attend)
    monkeypatch.setattr(kv_gather, "gather", double.gather)
    found = []
    for seed, requests in enumerate(STEPS):
        spoil(ours, requests, kind.window)
        found.append(attended(ours, kind, seed))
    if by_mlx.prompts:
        assert double.calls
    for ours_found, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours_found, expected, atol=2e-5)


def spoil(kv_cache, requests, window):
    """Writes NaN to every slot that no row of the step sees, before the step writes its own."""
    seen = np.zeros((BLOCKS, 16), bool)
    for blocks, before, _ in requests:
        positions = np.arange(0 if window is None else max(before - window + 1, 0), before)
        seen[np.array(blocks)[positions // 16], positions % 16] = True
    blocks, offsets = map(mx.array, np.nonzero(~seen))
    for part in (kv_cache.keys, kv_cache.values):
        spoiled = part.elements if part.scales is None else part.scales
        spoiled[:, blocks, offsets] = float("nan")


def attended(kv_cache, kind, seed):
    rng, where = np.random.default_rng(seed), layout_of(STEPS[seed], pace=Pace())
    num_rows = len(where.slot_mapping_np)
    queries, keys, values = (
        mx.array(rng.normal(size=(num_rows, heads, 64)).astype(np.float32)) for heads in (4, 2, 2)
    )
    plan = kv_cache.backend.plan(where, kind)
    kv_cache.begin_step()
    kv_cache.write(plan, keys, values)
    return np.array(kv_cache.attend(plan, queries, Scoring(0.1)))


def test_heads_in_turns_are_read_in_order(monkeypatch):
    """Each turn reads what the one before wrote, and all before the next write."""
    monkeypatch.setattr(prompts, "GATHERED_AT_ONCE", 1)
    logger = Logger(metal_interpreter.metal_kernel)
    with kernel.using(logger.metal_kernel):
        ours = serving(ByMLX(prompts={1: 17})).allocate(BLOCKS, 16, KVShape(2, 64, 64), mx.float32)
        for seed in range(len(STEPS)):
            attended(ours, KINDS[0], seed)
    assert [dispatch.name for dispatch in logger.log].count("kv_gather") == 4 + 0 + 8
    assert prove_always(logger.log) == []


def test_steps_with_gathered_prompts_end_a_command_buffer_a_layer():
    """With any number of rows: otherwise all layers' contexts would exist at once."""
    rows = [([3, 1, 7, 9, 14], 0, 70)]
    for by_mlx, paced in ((ByMLX(), False), (ByMLX(prompts={1: 64}), True)):
        plan = serving(by_mlx).plan(layout_of(rows, pace=Pace()), KINDS[0])
        assert (plan.pace is not None) == paced
        assert serving(by_mlx).plan(layout_of(rows), KINDS[0]).pace is None
