# SPDX-License-Identifier: Apache-2.0
"""FP8 (E4M3) weights with scales per tensor, row or block.

The conversion is exact for scales per tensor or row: the stored values become MLX's mxfp8, with an
output scale. It is exact for block scales that are powers of two, too. Weights with other block
scales are rounded to MLX's affine mode, its only 8-bit mode with arbitrary scales within a row.
"""

from __future__ import annotations

import mlx.core as mx

from vllm_metal.engine.weights.packed import (
    Packed,
    Weight,
    chunks,
    exponents_of,
    requantized,
    stacked,
)
from vllm_metal.identity.model_files import ModelLoadError

_GROUP = 32  # group size of mxfp8


def of_rows(values: mx.array, scales: mx.array, dtype: mx.Dtype) -> Weight:
    """Converts a weight with one scale, or one per row.

    Args:
        values: [..., out, in] uint8, E4M3.
        scales: [], [1], [out] or [..., out or 1, 1] floating point; [E] for experts.
        dtype: dtype of activations.

    Raises:
        ModelLoadError: the scales have another shape.
    """
    *outer, num_out, num_in = values.shape
    scales = _by_row(scales, values.shape).astype(mx.float32)
    if num_in % _GROUP:
        dense = mx.from_fp8(values, mx.float32) * scales
        return dense.astype(dtype)
    exponents, mantissas = exponents_of(scales)
    shape = (*outer, num_out, num_in // _GROUP)
    output_scale = mx.broadcast_to(mantissas, (*outer, num_out, 1))[..., 0]
    by_group = mx.contiguous(mx.broadcast_to(exponents, shape))
    return Packed(values.view(mx.uint32), by_group, None, "mxfp8", 8, _GROUP, output_scale)


def of_blocks(
    values: mx.array,
    scales: mx.array,
    block: tuple[int, int],
    powers_of_two: bool,
    dtype: mx.Dtype,
) -> Weight:
    """Converts a weight with a scale per block; blocks at the edges may be cut.

    Args:
        values: [..., out, in] uint8, E4M3.
        scales: [..., ceil(out / block[0]), ceil(in / block[1])] floating point, or uint8: E8M0.
        block: rows and columns of a block.
        powers_of_two: whether the checkpoint declares its scales to be powers of two.
        dtype: dtype of activations.

    Raises:
        ModelLoadError: the scales do not fit such blocks, or are not powers of two.
    """
    *outer, num_out, num_in = values.shape
    expected = (*outer, -(-num_out // block[0]), -(-num_in // block[1]))
    if scales.shape != expected:
        raise ModelLoadError(
            f"has scales of shape {tuple(scales.shape)}, but blocks of {block[0]}x{block[1]} "
            f"require {expected}"
        )
    rows = mx.arange(num_out) // block[0]
    if powers_of_two and num_in % _GROUP == 0 and block[1] % _GROUP == 0:
        exponents = scales if scales.dtype == mx.uint8 else _exponents(scales)
        columns = mx.arange(0, num_in, _GROUP) // block[1]
        by_group = mx.take(mx.take(exponents, rows, axis=-2), columns, axis=-1)
        return Packed(values.view(mx.uint32), by_group, None, "mxfp8", 8, _GROUP)
    factors = from_e8m0(scales) if scales.dtype == mx.uint8 else scales.astype(mx.float32)
    columns = mx.arange(num_in) // block[1]
    parts = []
    # In chunks: float32 values of the whole weight would take four times its memory.
    for part in chunks(num_out, num_in):
        by_row = mx.take(mx.take(factors, rows[part], axis=-2), columns, axis=-1)
        parts.append(requantized(mx.from_fp8(values[..., part, :], mx.float32) * by_row, dtype))
    return stacked(parts)


def of_mxfp8(values: mx.array, exponents: mx.array) -> Packed:
    """Converts MX's own 8-bit format, with a power of two for every 32 values of a row.

    Args:
        values: [..., out, in] uint8, E4M3.
        exponents: [..., out, in / 32] uint8, E8M0.
    """
    return Packed(values.view(mx.uint32), exponents, None, "mxfp8", 8, _GROUP)


def from_e8m0(exponents: mx.array) -> mx.array:
    """Float32 powers of two from E8M0 exponents; 2**-127 becomes 0."""
    return (exponents.astype(mx.uint32) << 23).view(mx.float32)


def _by_row(scales: mx.array, shape: tuple[int, ...]) -> mx.array:
    """Reshapes scales per row or tensor to [..., out or 1, 1]."""
    *outer, num_out, _ = shape
    if scales.size == 1:
        return scales.reshape([1] * len(shape))
    for shape_by_row in ((*outer, num_out, 1), (*outer, 1, 1)):
        if scales.size == mx.zeros(shape_by_row).size:
            return scales.reshape(shape_by_row)
    raise ModelLoadError(f"has scales of shape {tuple(scales.shape)} for a weight of {shape}")


def _exponents(scales: mx.array) -> mx.array:
    exponents, mantissas = exponents_of(scales)
    if not mx.all((mantissas == 1) | (scales == 0)).item():
        raise ModelLoadError(
            "has scales other than powers of two, but quantization_config sets scale_fmt=ue8m0"
        )
    return exponents
