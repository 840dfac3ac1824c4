# SPDX-License-Identifier: Apache-2.0
"""Operations can execute every line of every .metal file."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from metal_interpreter import Coverage

import metal_kernels
from metal_kernels import (
    convolution,
    kernel,
    kv_blocks,
    kv_gather,
    kv_states,
    kv_write,
    paged_attention,
    recurrence,
)
from metal_kernels.paged_attention import AttentionShape, Tiles
from metal_kernels.sequences import RecurrenceInputs, StatePart
from tests.metal_kernels.elf import reads_elf
from tests.metal_kernels.paged_attention.batches import make_batch
from tests.metal_kernels.sequences_play import one_request

pytestmark = pytest.mark.more
METAL = sorted(path.name for path in Path(metal_kernels.__file__).parent.rglob("*.metal"))
F16, BF16, F32, FP8, INT8 = mx.float16, mx.bfloat16, mx.float32, mx.uint8, mx.int8

# Head size, dtype, cache, (computed, rows) of each request, group, blocks that all begin with.
ATTENTION = [
    (64, F32, None, [(0, 1), (37, 2)], 1),
    (80, BF16, INT8, [(5, 1)], 1),  # lanes past the end of a head
    (96, F16, FP8, [(5, 1)], 1),
    (128, F16, F16, [(600, 1)], 1),  # a head between two simdgroups; in parts
    (64, F16, FP8, [(3, 20)], 2),
    (192, F16, None, [(600, 5)], 4),  # tiles; a head between two simdgroups; in parts
    (64, F32, None, [(3, 1)] * 17, 1),  # room for one tile more
    (64, F32, None, [(0, 33)] * 17, 1),
    (576, BF16, None, [(5, 1)], 2),  # latents
    (64, F16, None, [(40, 1), (50, 1)], 1, 2),
    (576, BF16, FP8, [(5, 1)], 2),
    (576, F16, INT8, [(5, 1)], 2),
]


def attend(head_size, dtype, cache, requests, group, common=0):
    shape = AttentionShape(group, 1, head_size, min(head_size, 512))
    alike = [(range(len(requests)), common)]
    batch = make_batch(np.random.default_rng(0), requests, shape, dtype, cache, alike=alike)
    tiles = replace(Tiles.for_layer(shape), shared=0)
    plan = paged_attention.plan(
        batch.starts, batch.seq_lens, batch.tables, shape, tiles=tiles, block_size=16
    )
    out, _ = paged_attention.run(
        plan,
        batch.queries,
        batch.key_pool,
        batch.value_pool,
        mx.zeros(8, mx.uint32),
        0.1,
        softcap=5.0,
        sinks=mx.zeros(group),
        key_scales=batch.key_scales,
        value_scales=batch.value_scales,
    )
    assert np.isfinite(np.array(out.astype(F32))).all()


def write_and_gather(dtype, cache):
    # The first scale tried for fp8 is 1 then, its codes from the smallest to the largest.
    rows = mx.array(np.tile(np.geomspace(2**-9, 448, 20, dtype=np.float32), (3, 2, 1)))
    rows, slots = rows.astype(dtype), mx.array([17, -1, 3])
    pools, scales = pools_of(20, cache)
    fence = kv_write.write(rows, rows, slots, *pools, (), *scales)
    table = mx.array([[1, 0], [0, -1]])
    wide = mx.zeros((2, 2, 16, 32), cache)
    for to in {dtype, F32}:
        kv_gather.gather(wide, table, to, [fence], scales[0])


def pools_of(size, cache):
    """Makes pools of keys and values, and their scales."""
    pools = [mx.zeros((2, 2, 16, size), cache) for _ in range(2)]
    codes = cache in (FP8, INT8)
    return pools, [mx.zeros((2, 2, 16), mx.bfloat16) if codes else None for _ in pools]


def rotate_and_write(cache):
    """Writes rows of which a lane has two parts, and shorter ones with neighboring pairs."""
    for size, traditional in ((20, True), (160, False)):
        rows, (pools, scales) = mx.ones((3, 2, size)), pools_of(size, cache)
        rotation = kv_write.Rotation(kv_write.RotationKind(16, 0, traditional), base=1e4)
        kv_write.rotate_and_write(
            *(rows, rows, mx.array([17, -1, 3]), *pools, (), *scales),
            queries=rows,
            positions=mx.arange(3),
            rotation=rotation,
        )


def bring_states_on(pools, key_size, decays):
    """Moves states to another block by a convolution and a recurrence, past a block's end."""
    step = one_request(3, 2, 1, 2, 1, 2, (3, 0, 0, 0, 0, 0, 0, 0)).sequences()
    rows = mx.ones((3, 2, key_size))
    convolution.run(
        *(step, rows.reshape(3, -1), rows.reshape(3, -1), mx.ones((2 * key_size, 4)), None, pools),
        StatePart(0, (3, 2 * key_size), F16),
        state_bytes=1300,
    )
    inputs = RecurrenceInputs(rows, mx.ones((3, 2, 4)), mx.ones((3, 2)), decays)
    log_rates = mx.ones((2, key_size)) if decays is None else None
    part = StatePart(1280, (2, 4, key_size), F16)  # of V
    recurrence.run(step, rows, inputs, inputs, pools, part, True, log_rates)


@pytest.fixture(scope="module")
def report():
    coverage = Coverage()
    with kernel.using(coverage.metal_kernel):
        for case in ATTENTION:
            attend(*case)
        for dtype, cache in ((F32, FP8), (F16, INT8), (BF16, BF16), (F16, F16), (F32, F32)):
            write_and_gather(dtype, cache)
        rotate_and_write(FP8)
        pools = [mx.zeros((2, 4, 16, 20), F16)]
        kv_blocks.copy(pools, np.array([0]), np.array([1]))
        kv_blocks.zero(pools, np.array([0]))
        states, read = kv_states.read(pools, mx.array([1]), 40)
        kv_states.write(pools, np.array([2]), states, after=[read])
        pools *= 2
        for key_size, decays in ((20, mx.ones((3, 2))), (9, mx.ones((3, 2, 9))), (8, None)):
            bring_states_on(pools, key_size, decays)
    return coverage.report()


@reads_elf
def test_all_files_have_lines(report):
    assert sorted(report) == sorted(METAL)


@reads_elf
@pytest.mark.parametrize("name", METAL)
def test_no_line_is_missed(report, name):
    assert report[name].missed == []
