# SPDX-License-Identifier: Apache-2.0
"""write() puts a step's keys and values into the pool: grid and checks, one dispatch."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from metal_kernels import kernel, op_common

_LANES = 32
_SIMDGROUPS = 8  # of a threadgroup
_KERNEL = kernel.load(
    Path(__file__).with_name("kv_write.metal"),
    input_names=(
        *("keys", "values", "slot_mapping"),
        *("key_pool", "value_pool", "key_scales", "value_scales"),
        *("after_0", "after_1"),
    ),
    output_names=("fence",),
    shared=("numeric.metal",),
)


def write(
    keys: mx.array,
    values: mx.array | None,
    slot_mapping: mx.array,
    key_pool: mx.array,
    value_pool: mx.array | None,
    after: Sequence[mx.array] = (),
    key_scales: mx.array | None = None,
    value_scales: mx.array | None = None,
) -> mx.array:
    """Writes rows into the pools, in place: done once the fence is computed.

    Args:
        keys: [T, Hkv, D] float16, bfloat16 or float32.
        values: [T, Hkv, Dv], the dtype of keys; None: the pool has keys only, as MLA's latents.
        slot_mapping: [T or more] int32 or int64; row t goes to block slot // block_size, offset
            slot % block_size. A row whose slot the pool lacks, as -1, is not written; two rows must
            not share a slot. What exceeds T is ignored: with 8 or more entries nothing is padded.
        key_pool: [Hkv, B, block_size, D], row-contiguous (a copy would be written otherwise), of
            one of the dtypes of keys, or uint8 for fp8 e4m3 codes, or int8 for integer ones.
        value_pool: [Hkv, B, block_size, Dv], the dtype of key_pool; None as `values`.
        after: fences of the dispatches that must come before.
        key_scales: [Hkv, B, block_size] bfloat16, for a pool of codes: value = code * scale, where
            scale = max |row| / 127 for int8, rounded to bfloat16, and each code is that of
            element / scale; for fp8 the one of / 448, / 416, / 384, / 352, / 320, / 288 and / 256
            that gives the row the least sum of squared errors. No element of a row that holds a NaN
            or an infinity decodes to a finite number.
        value_scales: likewise.

    Returns:
        [8] uint32, the fence of this write.

    Raises:
        ValueError: shapes or dtypes are not as above.
    """
    _check_rows("keys", keys, key_pool)
    if (values is None) != (value_pool is None):
        raise ValueError("values and value_pool: expected both or neither")
    if values is not None and value_pool is not None:
        _check_rows("values", values, value_pool)
        _check_alike(keys, values, key_pool, value_pool)
        op_common.check_scales("value_scales", value_scales, value_pool)
    op_common.check_scales("key_scales", key_scales, key_pool)
    num_tokens, num_heads, key_size = keys.shape
    _check_slot_mapping(slot_mapping, num_tokens)
    if num_tokens == 0:
        return op_common.merged(after)
    heads = min(num_heads, _SIMDGROUPS)
    (fence,) = _KERNEL(
        inputs=[
            keys,
            keys if values is None else values,
            op_common.padded(slot_mapping.astype(mx.int32), fill=-1),
            key_pool,
            key_pool if value_pool is None else value_pool,
            op_common.NO_SCALES if key_scales is None else key_scales,
            op_common.NO_SCALES if value_scales is None else value_scales,
            *op_common.fences(after),
        ],
        template=[
            ("T", keys.dtype),
            ("C", key_pool.dtype),
            ("KEY_SIZE", key_size),
            ("VALUE_SIZE", key_size if values is None else values.shape[2]),
            ("HAS_VALUES", values is not None),
        ],
        grid=(_LANES, num_heads, num_tokens),
        threadgroup=(_LANES, heads, _SIMDGROUPS // heads),
        output_shapes=[op_common.FENCE_SHAPE],
        output_dtypes=[op_common.FENCE_DTYPE],
    )
    return fence


def _check_rows(name: str, rows: mx.array, pool: mx.array) -> None:
    """`name` is keys or values."""
    part = name.removesuffix("s")
    if rows.ndim != 3 or rows.dtype not in op_common.VALUE_DTYPES:
        raise ValueError(f"{name}: expected [T, Hkv, D] floats, found {rows.shape} {rows.dtype}")
    if 0 < rows.size < kernel.MIN_ELEMENTS:
        raise ValueError(
            f"{name}: expected {kernel.MIN_ELEMENTS} elements or more, found {rows.size}"
        )
    if pool.ndim != 4 or (pool.shape[0], pool.shape[3]) != rows.shape[1:]:
        raise ValueError(
            f"{part}_pool: expected [{rows.shape[1]}, B, block_size, {rows.shape[2]}] as {name} "
            f"have it, found {pool.shape}"
        )
    if pool.dtype not in op_common.POOL_DTYPES:
        raise ValueError(f"{part}_pool: expected floats, uint8 or int8, found {pool.dtype}")


def _check_alike(
    keys: mx.array, values: mx.array, key_pool: mx.array, value_pool: mx.array
) -> None:
    if values.shape[:2] != keys.shape[:2] or values.dtype != keys.dtype:
        raise ValueError(
            f"values: expected {keys.shape[:2]} rows of {keys.dtype} as keys are, "
            f"found {values.shape[:2]} of {values.dtype}"
        )
    if value_pool.shape[:3] != key_pool.shape[:3] or value_pool.dtype != key_pool.dtype:
        raise ValueError(
            f"value_pool: expected {key_pool.shape[:3]} {key_pool.dtype} as key_pool is, "
            f"found {value_pool.shape[:3]} {value_pool.dtype}"
        )


def _check_slot_mapping(slot_mapping: mx.array, num_tokens: int) -> None:
    if slot_mapping.ndim != 1 or slot_mapping.dtype not in (mx.int32, mx.int64):
        raise ValueError(
            "slot_mapping: expected a flat int32 or int64 array, "
            f"found {slot_mapping.shape} {slot_mapping.dtype}"
        )
    if slot_mapping.size < num_tokens:
        raise ValueError(
            f"slot_mapping: expected a slot for each of {num_tokens} rows, "
            f"found {slot_mapping.size}"
        )
