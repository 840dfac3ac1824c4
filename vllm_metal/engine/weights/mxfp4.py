# SPDX-License-Identifier: Apache-2.0
"""Converts MXFP4, 4-bit floats (E2M1) with a power of two for every 32 values; exact in MLX."""

from __future__ import annotations

import mlx.core as mx

from vllm_metal.engine.weights.packed import Packed
from vllm_metal.identity.model_files import ModelLoadError

_GROUP = 32


def of_weight(values: mx.array, exponents: mx.array) -> Packed:
    """Converts a weight, or stacked weights of experts.

    Args:
        values: [..., out, in / 2] uint8, or gpt-oss' blocks [..., out, in / 32, 16]; the low half
            of a byte comes first.
        exponents: [..., out, in / 32] uint8, E8M0.

    Raises:
        ModelLoadError: the shapes do not fit.
    """
    if values.ndim == exponents.ndim + 1:
        values = values.flatten(-2)
    if exponents.shape != (*values.shape[:-1], 2 * values.shape[-1] // _GROUP):
        raise ModelLoadError(
            f"has MXFP4 scales of shape {tuple(exponents.shape)} for values of "
            f"{tuple(values.shape)}"
        )
    return Packed(values.view(mx.uint32), exponents, None, "mxfp4", 4, _GROUP)
