# SPDX-License-Identifier: Apache-2.0
"""The attention kernels, interpreted and checked, against a float64 formula and the reference."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.metal_kernels.paged_attention.batches import decoded, expected, make_batch

from metal_kernels import kernel, paged_attention
from metal_kernels.interpreter import Checker
from metal_kernels.paged_attention import AttentionShape, reference
from metal_kernels.paged_attention.op import HEAD_SIZES

DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}
CACHES = {"same": None, "fp8": mx.uint8, "int8": mx.int8}
SCHEDULES = ("forward", "reverse", "random:1", "random:2")
TOKEN = mx.zeros(8, mx.uint32)
SCALE = 0.09


def attend(batch, window=None, softcap=None, sinks=None):
    plan = paged_attention.plan(batch.starts, batch.seq_lens, batch.tables, batch.shape, window)
    out, tokens = paged_attention.run(
        plan,
        batch.queries,
        batch.key_pool,
        batch.value_pool,
        TOKEN,
        SCALE,
        softcap=softcap,
        sinks=None if sinks is None else mx.array(sinks),
        key_scales=batch.key_scales,
        value_scales=batch.value_scales,
    )
    assert all(np.array(token).tolist() == [0] * 8 for token in tokens)
    return out


def check(batch, compiler, window=None, softcap=None, sinks=None):
    with kernel.using(compiler):
        out = attend(batch, window, softcap, sinks)
    assert out.dtype == batch.queries.dtype
    found = np.array(out.astype(mx.float32))
    wanted = expected(batch, SCALE, window, softcap, sinks)
    # An output is an average of values: each, and the output, rounded to the dtype once at most.
    largest = max(np.abs(values).max() for _, values in batch.contexts)
    atol = float(mx.finfo(out.dtype).eps) * largest + 1e-5  # and float32's sums
    np.testing.assert_allclose(found, wanted, atol=atol, rtol=0)


# Decode rows, a verify window, and a prompt behind a prefix: per request (computed, rows).
STEPS = {
    "decode": [(0, 1), (37, 1), (15, 1), (16, 1)],
    "prefill": [(21, 12), (0, 9), (4, 1)],
}
FEATURES = [  # block size, group, window, softcap, sinks
    (16, 1, None, None, False),
    (32, 3, 7, None, True),
    (16, 8, 20, 5.0, False),
    (32, 2, None, 5.0, True),
]


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_combination(head_size, dtype, cache, kind):
    rng = np.random.default_rng(head_size)
    for (block_size, group, window, softcap, with_sinks), schedule in zip(
        FEATURES, SCHEDULES, strict=True
    ):
        shape = AttentionShape(2 * group, 2, head_size, head_size)
        batch = make_batch(rng, STEPS[kind], shape, DTYPES[dtype], CACHES[cache], block_size)
        sinks = rng.normal(size=2 * group).astype(np.float32) if with_sinks else None
        check(batch, Checker(schedule=schedule).metal_kernel, window, softcap, sinks)
