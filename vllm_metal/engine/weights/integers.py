# SPDX-License-Identifier: Apache-2.0
"""Converts packed integers with scales and zeros: compressed-tensors, GPTQ, AWQ, AutoRound.

A value is `scale * (integer - zero)`; MLX's affine mode computes it as `scale * integer + bias`.
"""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from vllm_metal.engine.weights.packed import (
    AFFINE_BITS,
    Weight,
    affine,
    group_size_of,
    pack,
    unpack,
)
from vllm_metal.identity.model_files import ModelLoadError

#: Positions of columns 0 to 7 within an AWQ word.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def gptq(
    qweight: mx.array,
    scales: mx.array,
    qzeros: mx.array | None,
    g_idx: mx.array | None,
    bits: int,
    zeros_are_less_one: bool,
    symmetric: bool,
    dtype: mx.Dtype,
    group_size: int | None = None,
) -> Weight:
    """Converts a linear layer's weight in GPTQ's format.

    Args:
        qweight: [in * bits / 32, out] int32, a stream of bits down each column.
        scales: [groups, out] floating point.
        qzeros: [groups, out * bits / 32] int32, a stream of bits along each row; None: 2**(bits-1).
        g_idx: [in] int32, each input's group; None: in order.
        zeros_are_less_one: whether `qzeros` are zeros minus one (checkpoint_format "gptq").
        symmetric: whether all zeros are declared to be 2**(bits-1) (`sym`).
        dtype: dtype of activations.
        group_size: the configured size; None for whole rows, or to infer it from the shapes.

    Raises:
        ModelLoadError: shapes do not fit, or zeros are not 2**(bits-1) despite `symmetric`.
    """
    groups, num_out = scales.shape
    quantized = mx.contiguous(_words(qweight).T)
    zeros: mx.array | int = 1 << (bits - 1)
    if qzeros is not None:
        stored = unpack(mx.contiguous(_words(qzeros)), bits)[:, :num_out]
        read = stored.astype(mx.int32).T + int(zeros_are_less_one)
        # Some tools leave the zeros of symmetric weights at 0.
        if symmetric and not mx.all((read == zeros) | (stored.T == 0)).item():
            raise ModelLoadError(
                f"has zeros other than {zeros}, but quantization_config sets sym=true: "
                "checkpoint_format or sym is wrong"
            )
        zeros = zeros if symmetric else read
    by_row = mx.contiguous(scales.T)
    if g_idx is None or groups == 1:
        return affine(quantized, by_row, zeros, bits, dtype, group_size, packed=True)
    return _grouped_by_index(quantized, by_row, zeros, g_idx, bits, group_size, dtype)


def awq(
    qweight: mx.array,
    scales: mx.array,
    qzeros: mx.array | None,
    dtype: mx.Dtype,
    group_size: int | None = None,
) -> Weight:
    """Converts a linear layer's 4-bit weight in AWQ's format (version "gemm").

    Args:
        qweight: [in, out / 8] int32.
        scales: [groups, out] floating point.
        qzeros: [groups, out / 8] int32; None: 8.
        dtype: dtype of activations.
        group_size: see `gptq`.
    """
    quantized = pack(mx.contiguous(_awq_columns(qweight).T), 4)
    zeros = 8 if qzeros is None else _awq_columns(qzeros).T
    return affine(quantized, mx.contiguous(scales.T), zeros, 4, dtype, group_size, packed=True)


def awq_by_rows(
    qweight: mx.array,
    scales: mx.array,
    qzeros: mx.array | None,
    dtype: mx.Dtype,
    group_size: int | None = None,
) -> Weight:
    """Converts a linear layer's weight in AWQ's format for single-row products (version "gemv").

    Args:
        qweight: [out, in / 8] int32, in order.
        scales: [out, 8 * words] floating point: one per group, then padding.
        qzeros: [out, words] int32, in order; None: 8.
        dtype: dtype of activations.
        group_size: the configured size; None for whole rows.
    """
    num_in = qweight.shape[-1] * 8
    groups = 1 if group_size is None else num_in // group_size
    zeros: mx.array | int = 8
    if qzeros is not None:
        zeros = unpack(_words(qzeros), 4)[:, :groups].astype(mx.int32)
    scales = mx.contiguous(scales[:, :groups])
    return affine(_words(qweight), scales, zeros, 4, dtype, group_size, packed=True)


def compressed(
    packed: mx.array,
    scales: mx.array,
    zeros: mx.array | None,
    g_idx: mx.array | None,
    bits: int,
    num_in: int,
    dtype: mx.Dtype,
    group_size: int | None = None,
) -> Weight:
    """Converts a weight in compressed-tensors' "pack-quantized" format.

    Stored integers are positive: an offset was added. A word holds as many whole ones as fit.

    Args:
        packed: [..., out, words] int32.
        scales: [..., out, groups] floating point.
        zeros: [..., out / values per word, groups] int32, packed down columns; None: 2**(bits-1).
        g_idx: [in] int32, each input's group; None or negative: in order.
        num_in: columns of the weight (`weight_shape`).
        dtype: dtype of activations.
        group_size: see `gptq`.
    """
    per = 32 // bits
    middle = 1 << (bits - 1)
    # If values fill words, these are MLX's packing already.
    whole = bits in (2, 4, 8) and num_in % per == 0 and bits in AFFINE_BITS
    quantized = _words(packed) if whole else _unpack_words(packed, bits, num_in)
    read: mx.array | int = middle
    if zeros is not None:
        num_out = scales.shape[-2]
        down = _unpack_words(zeros.swapaxes(-1, -2), bits, num_out)
        read = down.swapaxes(-1, -2).astype(mx.int32)
    if g_idx is None:
        return affine(quantized, scales, read, bits, dtype, group_size, packed=whole)
    if not whole and bits in AFFINE_BITS:
        quantized = pack(quantized, bits)
    return _grouped_by_index(quantized, scales, read, g_idx, bits, group_size, dtype)


def integers(
    values: mx.array,
    scales: mx.array,
    zeros: mx.array | None,
    dtype: mx.Dtype,
    group_size: int | None = None,
) -> Weight:
    """Converts 8-bit integers with scales per row or group ("int-quantized").

    Args:
        values: [..., out, in] int8.
        scales: [..., out, groups] floating point, or one for the tensor.
        zeros: int8, shaped as scales; None: 0.
        dtype: dtype of activations.
        group_size: see `gptq`.
    """
    *outer, num_out, _ = values.shape
    if scales.size == 1:
        scales = mx.broadcast_to(scales.reshape([1] * values.ndim), (*outer, num_out, 1))
        zeros = (
            None
            if zeros is None
            else mx.broadcast_to(zeros.reshape([1] * values.ndim), scales.shape)
        )
    # Flipping the sign bit adds 128: MLX's quantized values are unsigned.
    quantized = (values.view(mx.uint8) ^ 0x80).view(mx.uint32)
    shifted = 128 if zeros is None else zeros.astype(mx.int32) + 128
    return affine(quantized, scales, shifted, 8, dtype, group_size, packed=True)


def _words(packed: mx.array) -> mx.array:
    return packed.view(mx.uint32)


def _unpack_words(packed: mx.array, bits: int, count: int) -> mx.array:
    """Unpacks [..., count] uint8 from words with 32 // bits values each."""
    words, mask = _words(mx.contiguous(packed)), (1 << bits) - 1
    values = [((words >> (bits * i)) & mask).astype(mx.uint8) for i in range(32 // bits)]
    return mx.stack(values, axis=-1).flatten(-2)[..., :count]


def _awq_columns(packed: mx.array) -> mx.array:
    """Unpacks AWQ's words along a row to [rows, columns] uint8."""
    nibbles = unpack(_words(packed), 4)
    by_word = nibbles.reshape(*nibbles.shape[:-1], -1, 8)
    return mx.take(by_word, mx.array(_AWQ_ORDER), axis=-1).flatten(-2)


def _grouped_by_index(
    quantized: mx.array,
    scales: mx.array,
    zeros: mx.array | int,
    g_idx: mx.array,
    bits: int,
    group_size: int | None,
    dtype: mx.Dtype,
) -> Weight:
    """Makes a weight from `g_idx`: sorts columns by group, and records their order.

    `quantized` are in MLX's packing, or [out, in] uint8 if MLX has none for `bits`.
    """
    is_packed = bits in AFFINE_BITS
    num_in, count = len(g_idx), scales.shape[-1]
    size = group_size_of(num_in, count, group_size)
    in_order = mx.arange(num_in) // size
    # -1 means no order; so do all zeros, which placeholders of headers-only checkpoints have.
    if mx.any(g_idx < 0).item() or not mx.any(g_idx).item() or mx.array_equal(g_idx, in_order):
        return affine(quantized, scales, zeros, bits, dtype, group_size, packed=is_packed)
    values = unpack(quantized, bits) if is_packed else quantized
    order = mx.argsort(g_idx)
    if not mx.array_equal(mx.take(g_idx, order), in_order).item():  # groups of several sizes
        spread = zeros if isinstance(zeros, int) else mx.take(zeros, g_idx, axis=-1)
        dense = (values.astype(mx.float32) - spread) * mx.take(scales, g_idx, axis=-1)
        return dense.astype(dtype)
    values = mx.take(values, order, axis=-1)
    weight = affine(values, scales, zeros, bits, dtype, group_size)
    if isinstance(weight, mx.array):
        return mx.take(weight, mx.argsort(order), axis=-1)
    return replace(weight, input_order=order.astype(mx.int32))
