# SPDX-License-Identifier: Apache-2.0
"""The same in MLX operations, which return new pools."""

from typing import NamedTuple

import mlx.core as mx

from metal_kernels.arguments import SCALE_DTYPE

_LARGEST_CODE = {mx.uint8: 448.0, mx.int8: 127.0}


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
    """The pools after `kv_write.write` of the same arguments."""
    new_keys, new_key_scales = _write_one(keys, slot_mapping, key_pool, key_scales)
    if values is None or value_pool is None:
        return Pools(new_keys, None, new_key_scales, None)
    new_values, new_value_scales = _write_one(values, slot_mapping, value_pool, value_scales)
    return Pools(new_keys, new_values, new_key_scales, new_value_scales)


def encode(rows: mx.array, dtype: mx.Dtype) -> tuple[mx.array, mx.array | None]:
    """Elements of a pool of `dtype` for [..., D] rows, and their [...] scales if it holds codes.

    Each row is encoded by itself, so what a pool holds of a token is the same whichever step and
    batch brought it there.
    """
    if dtype not in _LARGEST_CODE:
        return rows.astype(dtype), None
    rows = rows.astype(mx.float32)
    scales = (mx.abs(rows).max(axis=-1) / _LARGEST_CODE[dtype]).astype(SCALE_DTYPE)
    # A scale rounded down puts the largest element past the largest code by 2^-9 of it at most, too
    # little to round to anything else.
    divisors = scales.astype(mx.float32)
    rows = rows / mx.where(divisors > 0, divisors, 1.0)[..., None]
    if dtype == mx.uint8:
        return mx.to_fp8(rows), scales
    return mx.clip(mx.round(rows), -127, 127).astype(mx.int8), scales


def _write_one(
    rows: mx.array, slot_mapping: mx.array, pool: mx.array, scales: mx.array | None
) -> tuple[mx.array, mx.array | None]:
    codes, new_scales = encode(rows, pool.dtype)
    slots = slot_mapping[: len(rows)]
    if scales is None or new_scales is None:
        return _scatter(pool, slots, codes), None
    return _scatter(pool, slots, codes), _scatter(scales, slots, new_scales)


def _scatter(pool: mx.array, slots: mx.array, rows: mx.array) -> mx.array:
    """[T, Hkv, ...] rows in a [Hkv, B, block_size, ...] pool."""
    flat = pool.flatten(1, 2)
    num_slots = flat.shape[1]
    flat = mx.concatenate([flat, flat[:, :1]], axis=1)  # one more slot, for rows that go nowhere
    flat[:, mx.where((slots < 0) | (slots >= num_slots), num_slots, slots)] = rows.swapaxes(0, 1)
    return flat[:, :num_slots].reshape(pool.shape)
