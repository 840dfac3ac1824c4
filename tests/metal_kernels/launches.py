# SPDX-License-Identifier: Apache-2.0
"""Calls each operation with arbitrary data, for compilers that run nothing."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from metal_kernels import (
    convolution,
    kv_blocks,
    kv_gather,
    kv_states,
    kv_write,
    paged_attention,
    recurrence,
)
from metal_kernels.kv_write import Rotation, RotationKind
from metal_kernels.op_common import QUANTIZED_DTYPES
from metal_kernels.paged_attention import AttentionShape
from metal_kernels.sequences import RecurrenceInputs, StatePart
from tests.metal_kernels.paged_attention.batches import make_batch
from tests.metal_kernels.sequences_play import one_request


def attend(
    requests: Sequence[tuple[int, int]],
    shape: AttentionShape,
    dtype: mx.Dtype = mx.float16,
    cache: mx.Dtype | None = None,
) -> None:
    """Attends for requests given as (computed, rows)."""
    batch = make_batch(np.random.default_rng(0), requests, shape, dtype, cache)
    plan = paged_attention.plan(batch.starts, batch.seq_lens, batch.tables, batch.shape)
    paged_attention.run(
        plan,
        batch.queries,
        batch.key_pool,
        batch.value_pool,
        mx.zeros(8, mx.uint32),
        0.1,
        key_scales=batch.key_scales,
        value_scales=batch.value_scales,
    )


def _pool(size: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array | None]:
    scales = mx.zeros((2, 1, 16), mx.bfloat16) if dtype in QUANTIZED_DTYPES else None
    return mx.zeros((2, 1, 16, size), dtype), scales


def write(
    dtype: mx.Dtype, cache: mx.Dtype, key_size: int = 64, value_size: int | None = 64
) -> None:
    keys, key_scales = _pool(key_size, cache)
    values, value_scales = _pool(value_size, cache) if value_size else (None, None)
    kv_write.write(
        mx.zeros((3, 2, key_size), dtype),
        mx.zeros((3, 2, value_size), dtype) if value_size else None,
        mx.arange(3),
        keys,
        values,
        key_scales=key_scales,
        value_scales=value_scales,
    )


def rotate(
    dtype: mx.Dtype, cache: mx.Dtype, kind: RotationKind, key_size: int = 64, values: bool = True
) -> None:
    """Writes rotated keys, and rotates queries unless keys are latents."""
    keys, key_scales = _pool(key_size, cache)
    pool, value_scales = _pool(key_size, cache) if values else (None, None)
    rows = mx.zeros((3, 2, key_size), dtype)
    latent, tails = mx.split(rows, [kind.first], axis=-1) if kind.first else (rows, None)
    kv_write.rotate_and_write(
        latent,
        rows if values else None,
        mx.arange(3),
        keys,
        pool,
        key_scales=key_scales,
        value_scales=value_scales,
        queries=None if kind.first else mx.zeros((3, 8, key_size), dtype),
        positions=mx.arange(3),
        rotation=Rotation.of_zeros(kind),
        tails=tails,
    )


def gather(dtype: mx.Dtype, cache: mx.Dtype, size: int = 64) -> None:
    codes, scales = _pool(size, cache)
    kv_gather.gather(codes, mx.zeros((2, 1), mx.int32), dtype, scales=scales)


def move(dtype: mx.Dtype) -> None:
    """Copies and clears blocks, reads and writes states."""
    pools = [mx.zeros((2, 4, 16, 64), dtype), mx.zeros((2, 4, 16))]
    kv_blocks.copy(pools, np.array([0]), np.array([1]))
    kv_blocks.zero(pools, np.array([0]))
    states, _ = kv_states.read(pools[:1], mx.array([1]), 40)
    kv_states.write(pools[:1], np.array([2]), states)


def convolve(dtype: mx.Dtype, cache: mx.Dtype | None = None) -> None:
    pools = [mx.zeros((2, 4, 16, 64), cache or dtype)]
    convolution.run(
        *(one_request(3, 1).sequences(), mx.zeros((3, 8), dtype), None),
        *(mx.zeros((8, 4), dtype), mx.zeros(8, dtype)),
        *(pools, StatePart(0, (3, 8), dtype)),
        state_bytes=3 * 8 * dtype.size,
    )


def recur(
    dtype: mx.Dtype,
    cache: mx.Dtype | None = None,
    key_size: int = 8,
    decays: int = 0,
    delta: bool = True,
    states: mx.Dtype | None = None,
) -> None:
    """Applies rows to states of dtype `states`; decays: 0 per head, 1 per key, 2 from rates."""
    of_decays = {0: (3, 2), 1: (3, 2, key_size)}.get(decays)
    inputs = RecurrenceInputs(
        mx.zeros((3, 2, key_size), dtype),
        mx.zeros((3, 2, 4), dtype),
        mx.zeros((3, 2)),
        None if of_decays is None else mx.zeros(of_decays),
    )
    recurrence.run(
        *(one_request(3, 1).sequences(), mx.zeros((3, 2, key_size), dtype), inputs, None),
        [mx.zeros((2, 4, 16, max(64, key_size)), cache or dtype)],
        StatePart(0, (2, 4, key_size), states or dtype),
        delta,
        mx.zeros((2, key_size)) if of_decays is None else None,
    )
