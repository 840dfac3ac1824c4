# SPDX-License-Identifier: Apache-2.0
"""Attention of decodes in MLX's operations over contexts from `kv_gather`.

prompts.py does the same for prompts.
"""

from __future__ import annotations

import mlx.core as mx

from metal_kernels import kv_gather
from metal_kernels.op_common import merged
from metal_kernels.pace import Pace
from metal_kernels.paged_attention import reference
from metal_kernels.paged_attention.buckets import Bucket, BucketPlan

# On a GPU with matrix units, MLX's attention may be faster than our kernels, but it needs dense K
# and V. MLX's own indexed read would not wait for kernels that write into the pool; `kv_gather`
# reads between their fences.


def run(
    plan: BucketPlan,
    queries: mx.array,
    key_pool: mx.array,
    value_pool: mx.array,
    after: mx.array,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    key_scales: mx.array | None = None,
    value_scales: mx.array | None = None,
    pace: Pace | None = None,
) -> tuple[mx.array, list[mx.array]]:
    """Attends for one layer; see `paged_attention.run`. Returns one merged fence for all reads.

    `plan` must have `bounds`; its writes are ignored. For latents the result is [T, H, D], of which
    the first DV elements are valid.
    """
    fences: list[mx.array] = []

    def gather(pool: mx.array, bucket: Bucket, scales: mx.array | None) -> mx.array:
        context, read = kv_gather.gather(
            pool, bucket.block_table, queries.dtype, [after], scales, bucket.bounds
        )
        fences.append(read)
        return context

    out = reference.run(
        plan,
        queries,
        None,
        None,
        key_pool,
        value_pool,
        scale,
        sinks,
        softcap,
        key_scales=key_scales,
        value_scales=value_scales,
        pace=pace,
        gather=gather,
    )
    return out, [merged(fences)]
