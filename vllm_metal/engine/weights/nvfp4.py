# SPDX-License-Identifier: Apache-2.0
"""Converts NVFP4: 4-bit floats (E2M1), an E4M3 scale per 16 values, a float32 scale per tensor.

MLX's values and scales have the published layout. The tensor's scale becomes an output scale, which
is exact; MLX itself supports a tensor's scale only on a GPU, and not for experts.
"""

from __future__ import annotations

import mlx.core as mx

from vllm_metal.engine.weights.packed import Packed
from vllm_metal.identity.model_files import ModelLoadError

_GROUP = 16


def of_weight(values: mx.array, scales: mx.array, factor: mx.array | None) -> Packed:
    """Converts a weight, and multiplies it by `factor`, the tensor's scale.

    modelopt's `weight_scale_2` is the factor, compressed-tensors' `weight_global_scale` its
    reciprocal.

    Args:
        values: [..., out, in / 2] uint8; the low half of a byte comes first.
        scales: [..., out, in / 16] uint8, E4M3.
        factor: float32 of one element, or [E] for experts; None: 1.

    Raises:
        ModelLoadError: the shapes do not fit.
    """
    *outer, num_out, half = values.shape
    if scales.shape != (*outer, num_out, 2 * half // _GROUP) or half % 8:
        raise ModelLoadError(
            f"has NVFP4 scales of shape {tuple(scales.shape)} for {2 * half} inputs and "
            f"{num_out} outputs"
        )
    if factor is None:
        return Packed(values.view(mx.uint32), scales, None, "nvfp4", 4, _GROUP)
    factor = factor.astype(mx.float32)
    if factor.size != 1 and factor.shape[:1] != tuple(outer):
        raise ModelLoadError(f"has NVFP4 tensor scales of shape {tuple(factor.shape)}")
    by_row = factor.reshape([1] if factor.size == 1 else (*factor.shape[:1], 1))
    output_scale = mx.broadcast_to(by_row, (*outer, num_out))
    return Packed(
        values.view(mx.uint32), scales, None, "nvfp4", 4, _GROUP, mx.contiguous(output_scale)
    )
