# SPDX-License-Identifier: Apache-2.0
"""Which kind of region serves a model: the kernels', or MLX's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
from vllm.logger import init_logger

from metal_kernels import kernel, paged_attention
from vllm_metal import envs, selfcheck
from vllm_metal.kv_cache.kernels import KernelRegion
from vllm_metal.kv_cache.region import Region
from vllm_metal.kv_cache.scatter import ScatterRegion

if TYPE_CHECKING:
    from vllm_metal.attention.layers import AttentionLayer

logger = init_logger(__name__)


def region_type(
    device: envs.Device,
    layers: Sequence[AttentionLayer],
    dtype: mx.Dtype,
    pool_dtype: mx.Dtype,
    block_size: int,
) -> type[Region]:
    """Follows VLLM_METAL_KERNELS; with `auto`, whatever is right and quickest on this machine.

    Args:
        device: to serve on.
        layers: all that the pool is for.
        dtype: of their queries.
        pool_dtype: of the pool's elements.
        block_size: tokens of a block.

    Raises:
        ValueError: the kernels were asked for by name, and cannot serve the model or machine.
    """
    wanted = envs.kernels()
    if wanted == "mlx" or (wanted == "auto" and device == "cpu"):
        return ScatterRegion
    if wanted == "metal" and device == "cpu":
        raise ValueError("VLLM_METAL_KERNELS=metal needs a Metal device; on a CPU: mlx, interpret")
    if wanted == "interpret" and device == "metal":
        raise ValueError("VLLM_METAL_KERNELS=interpret needs VLLM_METAL_DEVICE=cpu")
    shapes = {layer.shape for layer in layers}
    reasons = {paged_attention.unsupported(shape, dtype, block_size) for shape in shapes} - {None}
    if wanted == "interpret":
        # An extra of its own: it brings a compiler.
        from metal_kernels.interpreter import metal_kernel

        kernel.use(metal_kernel)
    elif not reasons:
        kernel.use(mx.fast.metal_kernel)
        logger.info("Checking the Metal kernels; the result is kept for the next start")
        if failed := selfcheck.failures(selfcheck.cases(layers, dtype, pool_dtype, block_size)):
            advice = "`vllm-metal doctor` checks anew and writes a report to attach to a bug report"
            reasons = {f"they fail their self-check: {'; '.join(failed)}. {advice}"}
    if not reasons:
        return KernelRegion
    reason = "; ".join(sorted(str(reason) for reason in reasons))
    if wanted != "auto":
        raise ValueError(f"VLLM_METAL_KERNELS={wanted}: {reason}")
    logger.warning("Attention runs by MLX's own operations, not by Metal kernels: %s", reason)
    return ScatterRegion
