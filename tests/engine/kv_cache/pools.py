# SPDX-License-Identifier: Apache-2.0
"""Makes storages of both kinds, steps of one layer over them, and reads their bits."""

import mlx.core as mx
import numpy as np

from metal_kernels.paged_attention import AttentionShape
from vllm_metal.engine.kv_cache.kernels import KERNELS, KernelBackend
from vllm_metal.engine.kv_cache.layer_cache import AttentionKind, KVShape
from vllm_metal.engine.kv_cache.layer_state import StepLayout
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.patches.mlx_patches.seam import Scoring

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_size=64, value_size=64)
KINDS = {
    "kernels": KERNELS,
    "limited": KernelBackend(moves_blocks=False),
    "scatter": SCATTER,
}
DTYPES = [mx.float32, mx.float16, mx.bfloat16, mx.uint8, mx.int8]
BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}


def make(backend, dtype, num_blocks=12):
    return backend.allocate(num_blocks, 16, KVShape(2, 64, 64), dtype)


def built(kv_cache, blocks, before, rows, window=None, seed=0):
    """Returns the lazy [T, H, D] attention of a request's next rows."""
    positions = np.arange(before, before + rows)
    table = np.array([blocks], np.int32)
    slots = table[0, positions // 16] * 16 + positions % 16
    starts, ends = np.array([0, rows], np.int32), np.array([before + rows], np.int32)
    layout = StepLayout(starts, ends, table, slots.astype(np.int32), 16)
    codes = kv_cache.dtype in (mx.uint8, mx.int8)
    dtype = mx.float16 if codes else kv_cache.dtype
    rng = np.random.default_rng(seed + before)

    def draw(heads):
        sizes = 10.0 ** rng.uniform(-3, 1, (rows, 1, 1))  # so that scales differ
        return mx.array((rng.normal(size=(rows, heads, 64)) * sizes).astype(np.float32))

    queries, keys, values = (draw(heads).astype(dtype) for heads in (4, 2, 2))
    plan = kv_cache.backend.plan(layout, AttentionKind(SHAPE, window))
    kv_cache.begin_step()
    kv_cache.write(plan, keys, values)
    return kv_cache.attend(plan, queries, Scoring(0.1))


def bits(array):
    return np.array(array.view(BITS[array.dtype.size]))
