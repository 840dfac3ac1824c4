# SPDX-License-Identifier: Apache-2.0
"""Beginnings that requests have in common are read once in decode, and results stay right."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metal_interpreter import Checker

from metal_kernels import kernel, paged_attention
from metal_kernels.paged_attention import AttentionShape, Splits, Tiles, plan
from metal_kernels.paged_attention.op import HEAD_SIZES, LATENT_SIZES, SIZES_APART
from tests.metal_kernels.paged_attention.batches import expected, make_batch, overstated

SCALE = 0.09
FENCE = mx.zeros(8, mx.uint32)
DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
CACHES = {"same": None, "fp8": mx.uint8, "int8": mx.int8}
SCHEDULES = ("forward", "reverse", "random:1")


def plan_of(batch, block_size=16, most_behind=0, shared=0, **options):
    """A plan that shares whatever saves `shared` keys."""
    seq_lens, tables, behind = batch.seq_lens, batch.tables, None
    if most_behind:
        seq_lens, tables, behind = overstated(batch, most_behind)
    tiles = replace(Tiles.for_layer(batch.shape, options.get("window")), shared=shared)
    return plan(
        batch.starts,
        seq_lens,
        tables,
        batch.shape,
        tiles=tiles,
        behind=behind,
        block_size=block_size,
        **options,
    )


def check(batch, made, schedule="forward", softcap=None, sinks=None, window=None):
    with kernel.using(Checker(schedule).metal_kernel):
        out, fences = paged_attention.run(
            made,
            batch.queries,
            batch.key_pool,
            batch.value_pool,
            FENCE,
            SCALE,
            softcap=softcap,
            sinks=sinks,
            key_scales=batch.key_scales,
            value_scales=batch.value_scales,
        )
        mx.eval(out, fences)
    assert len(fences) == sum(len(dispatch.launches) for dispatch in made.dispatches)
    wanted_sinks = None if sinks is None else np.array(sinks.astype(mx.float32), np.float64)
    wanted = expected(batch, SCALE, window, softcap, wanted_sinks)
    largest = max(np.abs(values).max() for _, values in batch.contexts)
    atol = float(mx.finfo(out.dtype).eps) * largest + 1e-5  # as in test_op.py
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), wanted, atol=atol, rtol=0)


# Of each request (computed, rows): decodes and drafts, a prompt, one that shares nothing.
REQUESTS = [(52, 1), (49, 1), (75, 3), (40, 30), (20, 1), (330, 1), (310, 2)]
ALIKE = [((0, 1, 2, 3), 3), ((5, 6), 18)]


def check_features(rng, shape, dtype, cache_dtype):
    for (block_size, softcap, with_sinks, splits), schedule in zip(
        [(16, None, True, Splits()), (16, 5.0, False, Splits(slots=2**30)), (32, 4.0, True, None)],
        SCHEDULES,
        strict=True,
    ):
        alike = [(members, count * 16 // block_size) for members, count in ALIKE]
        batch = make_batch(rng, REQUESTS, shape, dtype, cache_dtype, block_size, alike)
        made = plan_of(batch, block_size, splits=splits or Splits())
        assert any(dispatch.shared is not None for dispatch in made.dispatches)
        sinks = mx.array(rng.normal(size=shape.num_heads)).astype(dtype) if with_sinks else None
        check(batch, made, schedule, softcap, sinks)


@pytest.mark.parametrize("cache", CACHES)
def test_every_cache(cache):
    rng = np.random.default_rng(2)
    check_features(rng, AttentionShape(4, 2, 64, 64), mx.float16, CACHES[cache])
