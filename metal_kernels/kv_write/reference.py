# SPDX-License-Identifier: Apache-2.0
"""kv_write with MLX's operations, which return new pools."""

from typing import NamedTuple

import mlx.core as mx

from metal_kernels.kv_write.rotation import Rotation
from metal_kernels.op_common import SCALE_DTYPE

# Quantized values for the largest element of a row; each gives the row another scale. Values of fp8
# have the same relative spacing in each octave, so another scale moves the elements relative to
# them and loses no useful range. A row takes the scale with the least error. An eighth value, 240,
# would lower the RMS error by 1 %.
_TOP_VALUES = {
    mx.uint8: (448.0, 416.0, 384.0, 352.0, 320.0, 288.0, 256.0),
    mx.int8: (127.0,),
}


class Pools(NamedTuple):
    keys: mx.array  # [Hkv, B, block_size, D]
    values: mx.array | None  # [Hkv, B, block_size, Dv]
    key_scales: mx.array | None  # [Hkv, B, block_size] bfloat16
    value_scales: mx.array | None


def write(
    keys: mx.array,
    values: mx.array | None,
    slot_mapping: mx.array,
    key_pool: mx.array,
    value_pool: mx.array | None,
    key_scales: mx.array | None = None,
    value_scales: mx.array | None = None,
) -> Pools:
    """Returns the pools after `kv_write.write`."""
    new_keys, new_key_scales = _write_one(keys, slot_mapping, key_pool, key_scales)
    if values is None or value_pool is None:
        return Pools(new_keys, None, new_key_scales, None)
    new_values, new_value_scales = _write_one(values, slot_mapping, value_pool, value_scales)
    return Pools(new_keys, new_values, new_key_scales, new_value_scales)


def rotate(rows: mx.array, positions: mx.array, rotation: Rotation) -> mx.array:
    """Rotates [T, H, D] rows by [T] positions in float32; returns the rows' dtype."""
    kind = rotation.kind
    before, rest = mx.split(rows.astype(mx.float32), [kind.first], axis=-1)
    rotated = mx.fast.rope(
        rest[:, :, None],
        kind.dims,
        traditional=kind.traditional,
        base=rotation.base,
        scale=rotation.scale,
        offset=positions[: len(rows)],
        freqs=rotation.frequencies,
    )
    return mx.concatenate([before, rotated[:, :, 0]], axis=-1).astype(rows.dtype)


def encode(rows: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array | None]:
    """Encodes [..., D] rows for a pool of `dtype`; returns [...] scales if it is quantized."""
    # Each row is encoded independently, so a token's K/V do not depend on its step or batch.
    if dtype not in _TOP_VALUES:
        return rows.astype(dtype), None
    rows = rows.astype(mx.float32)
    first, *others = _TOP_VALUES[dtype]
    quantized, scales = _encode(rows, dtype, first)
    if not others:
        return quantized, scales
    least = _error(rows, quantized, scales)
    for top in others:
        other_quantized, other_scales = _encode(rows, dtype, top)
        error = _error(rows, other_quantized, other_scales)
        better = error < least
        quantized = mx.where(better[..., None], other_quantized, quantized)
        scales = mx.where(better, other_scales, scales)
        least = mx.minimum(error, least)
    return quantized, scales


def _encode(rows: mx.array, dtype: mx.Dtype, top: float) -> tuple[mx.array, mx.array]:
    """Quantizes rows so that each row's largest element becomes `top`; also returns the scales."""
    scales = (mx.abs(rows).max(axis=-1) / top).astype(SCALE_DTYPE)
    # A scale that was rounded down moves the largest element beyond `top` by at most 2^-9 of it,
    # too little to change its rounding.
    rows = rows / _divisors(scales)
    if dtype == mx.uint8:
        return mx.to_fp8(rows), scales
    return mx.clip(mx.round(rows), -127, 127).astype(mx.int8), scales


def _divisors(scales: mx.array) -> mx.array:
    """Returns the scales as [..., 1] float32 divisors, 1 where a scale is 0."""
    factors = scales.astype(mx.float32)
    return mx.where(factors > 0, factors, 1.0)[..., None]


def _error(rows: mx.array, quantized: mx.array, scales: mx.array) -> mx.array:
    """Returns [...] uint32 sums of squared fp8 errors, in units of (max |row| / 2^14)^2."""
    # Integer sums do not depend on their order, so a kernel finds the same best scale. An error is
    # at most a sixteenth of the largest element: rows of up to 4096 elements do not overflow. A row
    # of zeros, or with a NaN or an infinity, has no error, but the same values for every scale.
    errors = rows - mx.from_fp8(quantized, dtype=mx.float32) * _divisors(scales)
    shares = errors / mx.abs(rows).max(axis=-1, keepdims=True) * 2.0**14
    return (shares * shares).astype(mx.uint32).sum(axis=-1)


def _write_one(
    rows: mx.array, slot_mapping: mx.array, pool: mx.array, scales: mx.array | None
) -> tuple[mx.array, mx.array | None]:
    quantized, new_scales = encode(rows, pool.dtype)
    slots = slot_mapping[: len(rows)]
    if scales is None or new_scales is None:
        return _scatter(pool, slots, quantized), None
    return _scatter(pool, slots, quantized), _scatter(scales, slots, new_scales)


def _scatter(pool: mx.array, slots: mx.array, rows: mx.array) -> mx.array:
    """Scatters [T, Hkv, ...] rows into a [Hkv, B, block_size, ...] pool."""
    flat = pool.flatten(1, 2)
    num_slots = flat.shape[1]
    # One extra slot for rows that are not written.
    flat = mx.concatenate([flat, flat[:, :1]], axis=1)
    flat[:, mx.where((slots < 0) | (slots >= num_slots), num_slots, slots)] = rows.swapaxes(0, 1)
    return flat[:, :num_slots].reshape(pool.shape)
