# SPDX-License-Identifier: Apache-2.0
"""Packed: a weight in one of MLX's quantized modes, and functions that pack integers.

MLX packs a row's values into a little-endian stream of bits without gaps; a value's lowest bit
comes first. `mx.quantize` documents the modes.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from vllm_metal.identity.model_files import ModelLoadError

#: Group sizes of MLX's affine mode, best first: larger groups take fewer bits.
AFFINE_GROUPS = (128, 64, 32)
#: Bits per value in MLX's affine mode.
AFFINE_BITS = (1, 2, 3, 4, 5, 6, 8)
#: Elements dequantized at once, so that loading takes little memory besides the weights.
_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Packed:
    """A lazy weight, or stacked weights of experts, in one of MLX's quantized modes.

    The weight is `dequantize(quantized, scales, biases)`, row r times `output_scale[r]`. `...` is
    empty, or one axis of experts.
    """

    quantized: mx.array  # quantized values, [..., out, in * bits / 32] uint32
    scales: mx.array  # [..., out, in / group_size]; floating point for "affine", else uint8
    biases: mx.array | None  # shaped as scales; for "affine" only
    mode: str  # "affine", "mxfp4", "mxfp8" or "nvfp4"
    bits: int
    group_size: int
    #: [..., out] float32 factors of the product; None: 1.
    output_scale: mx.array | None = None
    #: [in] int32, the input that each column multiplies; None: in order. Not for stacked experts.
    input_order: mx.array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., out, in] of the dense weight."""
        return (*self.quantized.shape[:-1], self.quantized.shape[-1] * 32 // self.bits)

    def dense(self, dtype: mx.Dtype) -> mx.array:
        """Dequantizes to [..., out, in]."""
        values = mx.dequantize(
            self.quantized, self.scales, self.biases, self.group_size, self.bits, self.mode
        )
        if self.output_scale is not None:
            values = values.astype(mx.float32) * self.output_scale[..., None]
        if self.input_order is not None:
            values = mx.take(values, mx.argsort(self.input_order), axis=-1)
        return values.astype(dtype)


#: The result of reading a format: packed, or dense in the activations' dtype if MLX has no packing
#: for it.
Weight = Packed | mx.array


def pack(values: mx.array, bits: int) -> mx.array:
    """Packs [..., n] uint8 values below 2**bits into [..., n * bits / 32] uint32.

    n must be a multiple of 32 / gcd(32, bits).
    """
    if bits == 8:
        return values.view(mx.uint32)
    per = {3: 8, 5: 8, 6: 4}.get(bits, 8 // bits)  # values that fill whole bytes
    columns = values.reshape(*values.shape[:-1], -1, per)
    filled = []
    for byte in range(per * bits // 8):
        parts = []
        for index in range(8 * byte // bits, (8 * byte + 7) // bits + 1):
            shift = index * bits - 8 * byte
            value = columns[..., index]
            parts.append(value << shift if shift >= 0 else value >> -shift)
        joined = parts[0]
        for part in parts[1:]:
            joined = joined | part
        filled.append(joined)
    return mx.stack(filled, axis=-1).flatten(-2).view(mx.uint32)


def unpack(packed: mx.array, bits: int) -> mx.array:
    """Unpacks [..., n * bits / 32] uint32 into [..., n] uint8 values; the inverse of `pack`."""
    stream = packed.view(mx.uint8)
    if bits == 8:
        return stream
    per = {3: 8, 5: 8, 6: 4}.get(bits, 8 // bits)
    columns = stream.reshape(*stream.shape[:-1], -1, per * bits // 8)
    mask = mx.array((1 << bits) - 1, mx.uint8)
    values = []
    for index in range(per):
        byte, shift = divmod(index * bits, 8)
        value = columns[..., byte] >> shift
        if shift + bits > 8:
            value = value | (columns[..., byte + 1] << (8 - shift))
        values.append(value & mask)
    return mx.stack(values, axis=-1).flatten(-2)


def affine(
    values: mx.array,
    scales: mx.array,
    zeros: mx.array | int,
    bits: int,
    dtype: mx.Dtype,
    size: int | None = None,
    packed: bool = False,
) -> Weight:
    """Packs the weight `scales * (values - zeros)`, whose scales are shared by groups of a row.

    Scales of whole rows are exact in every dtype: their powers of two become MLX's scales, and the
    rest an output scale. Other scales, and their products with zeros, are rounded to `dtype`.

    Args:
        values: [..., out, in] uint8, or [..., out, in * bits / 32] uint32 if `packed`.
        scales: [..., out, groups] floating point; groups are equal, but the last may be shorter.
        zeros: [..., out, groups] integers, or one for all.
        dtype: dtype of activations.
        size: configured columns per scale; None for equal groups.
        packed: whether `values` are in MLX's packing.

    Raises:
        ModelLoadError: the shapes do not fit such groups.
    """
    num_in = values.shape[-1] * 32 // bits if packed else values.shape[-1]
    count = scales.shape[-1]
    size = group_size_of(num_in, count, size)
    group = next(
        (g for g in AFFINE_GROUPS if num_in % g == 0 and (count == 1 or size % g == 0)), None
    )
    scales = scales.astype(mx.float32)
    if not isinstance(zeros, int):
        zeros = zeros.astype(mx.float32)
    if group is None:
        plain = unpack(values, bits) if packed else values
        group_indices = mx.minimum(mx.arange(num_in) // size, count - 1)
        if not isinstance(zeros, int):
            zeros = mx.take(zeros, group_indices, axis=-1)
        return (
            (plain.astype(mx.float32) - zeros) * mx.take(scales, group_indices, axis=-1)
        ).astype(dtype)
    if bits not in AFFINE_BITS:  # MLX has no 7 bits, for example: stored in 8
        values = unpack(values, bits) if packed else values
        bits, packed = 8, False
    quantized = values if packed else pack(values, bits)
    output_scale = None
    if count == 1:
        scales, output_scale = split_scale(scales)
        output_scale = output_scale[..., 0]
        group_indices = mx.zeros((num_in // group,), mx.int32)
    else:
        group_indices = mx.arange(0, num_in, group) // size
    biases = -zeros * scales
    scales, biases = (
        mx.take(each, group_indices, axis=-1).astype(dtype) for each in (scales, biases)
    )
    return Packed(quantized, scales, biases, "affine", bits, group, output_scale)


def group_size_of(num_in: int, count: int, stated: int | None = None) -> int:
    """Returns the columns per scale in a row of `num_in` columns with `count` scales.

    `stated` is the configured size, if positive.

    Raises ModelLoadError: there is no such size, or it differs from `stated`.
    """
    if stated is not None and stated > 0:
        if -(-num_in // min(stated, num_in)) != count:
            raise ModelLoadError(
                f"has {count} scales per row for {num_in} inputs, which is not group_size={stated}"
            )
        return min(stated, num_in)
    if count < 1 or num_in % count:
        raise ModelLoadError(f"has {count} scales per row for {num_in} inputs")
    return num_in // count


def split_scale(scales: mx.array) -> tuple[mx.array, mx.array]:
    """Splits float32 scales into powers of two within float16's range, and remaining factors.

    Products with the powers of two are exact and stay in the range of float16.
    """
    exponents, _ = exponents_of(scales)
    kept = mx.clip(exponents.astype(mx.uint32), 127 - 14, 127 + 14)  # normal numbers of float16
    powers = (kept << 23).view(mx.float32)
    return powers, scales.astype(mx.float32) / powers


def exponents_of(scales: mx.array) -> tuple[mx.array, mx.array]:
    """Splits float32 scales into E8M0 exponents (uint8: 2**(e - 127)) and float32 mantissas."""
    stored = scales.astype(mx.float32).view(mx.uint32)
    exponents = (stored >> 23) & 0xFF
    left = ((stored & 0x807FFFFF) | 0x3F800000).view(mx.float32)
    # 0 and subnormal numbers have no implicit leading one.
    left = mx.where(exponents == 0, scales.astype(mx.float32) * 2.0**126 * 2.0, left)
    return exponents.astype(mx.uint8), left


def requantized(dense: mx.array, dtype: mx.Dtype) -> Weight:
    """Quantizes a dense [..., out, in] weight to affine 8 bits, for formats without an MLX packing.

    Scales and biases are rounded to `dtype` before values are quantized with them. The error for
    normally distributed weights is 5.5e-3 of their root mean square.
    """
    num_in = dense.shape[-1]
    group = next((g for g in (64, 32, 128) if num_in % g == 0), None)
    if group is None:
        return dense.astype(dtype)
    groups = dense.astype(mx.float32).reshape(*dense.shape[:-1], -1, group)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    biases = low.astype(dtype)
    scales = ((high - biases.astype(mx.float32)) / 255).astype(dtype)
    step = mx.where(scales == 0, 1, scales.astype(mx.float32))
    values = mx.round((groups - biases.astype(mx.float32)) / step)
    values = mx.clip(values, 0, 255).astype(mx.uint8)
    quantized = values.reshape(dense.shape).view(mx.uint32)
    return Packed(quantized, scales[..., 0], biases[..., 0], "affine", 8, group)


def stacked(parts: list[Weight], axis: int = -2) -> Weight:
    """Concatenates weights with the same packing along an axis."""
    if len(parts) == 1:
        return parts[0]
    if any(not isinstance(part, Packed) for part in parts):
        return mx.concatenate([part for part in parts if isinstance(part, mx.array)], axis=axis)
    packed = [part for part in parts if isinstance(part, Packed)]
    first = packed[0]

    def joined(name: str, at: int = axis) -> mx.array | None:
        arrays = [getattr(part, name) for part in packed]
        return None if arrays[0] is None else mx.concatenate(arrays, axis=at)

    quantized, scales = joined("quantized"), joined("scales")
    assert quantized is not None and scales is not None
    output_scale = joined("output_scale", axis + 1)
    return Packed(
        quantized, scales, joined("biases"), first.mode, first.bits, first.group_size, output_scale
    )


def chunks(num_out: int, num_in: int, multiple: int = 1) -> list[slice]:
    """Divides rows into slices to dequantize at a time; their sizes are multiples of `multiple`,
    except for the last one's.
    """
    rows = max(_AT_ONCE // max(num_in, 1) // multiple, 1) * multiple
    return [slice(start, min(start + rows, num_out)) for start in range(0, num_out, rows)]
