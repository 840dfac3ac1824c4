# SPDX-License-Identifier: Apache-2.0
"""Writes a step's keys and values into the pool with one dispatch.

`write` stores keys unchanged; `rotate_and_write` rotates them, and queries, first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from metal_kernels import kernel, op_common
from metal_kernels.kv_write.rotation import Rotation, RotationKind

_LANES = 32
_SIMDGROUPS = 8  # per threadgroup
_KERNEL = kernel.load(
    Path(__file__).with_name("kv_write.metal"),
    input_names=(
        *("keys", "values", "slot_mapping"),
        *("key_pool", "value_pool", "key_scales", "value_scales"),
        *("tails", "queries", "positions", "frequencies", "angles"),
        *("after_0", "after_1"),
    ),
    output_names=("rotated", "fence"),
    shared=("numeric.metal",),
)
_NO_ANGLES = mx.array([0.0] * kernel.MIN_ELEMENTS)
_NO_ROTATION = Rotation(RotationKind(0))


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows to write and their destination; the fields are arguments of `write`."""

    keys: mx.array
    values: mx.array | None
    slot_mapping: mx.array
    key_pool: mx.array
    value_pool: mx.array | None
    after: Sequence[mx.array]
    key_scales: mx.array | None
    value_scales: mx.array | None


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
    """Writes rows into the pools in place; the write runs when the fence is evaluated.

    Args:
        keys: [T, Hkv, D] float16, bfloat16 or float32.
        values: [T, Hkv, Dv], the dtype of keys; None: the pool has keys only, such as MLA latents.
        slot_mapping: [T or more] int32 or int64; row t goes to block slot // block_size, offset
            slot % block_size. Rows with slots outside the pool, such as -1, are not written; two
            rows must not share a slot. Entries beyond T are ignored: 8 or more avoid padding.
        key_pool: [Hkv, B, block_size, D], row-contiguous (otherwise a copy would be written), in a
            dtype of keys, uint8 for fp8 e4m3 or int8 for integers.
        value_pool: [Hkv, B, block_size, Dv], the dtype of key_pool; None if `values` is.
        after: fences of earlier dispatches.
        key_scales: [Hkv, B, block_size] bfloat16, for a quantized pool: value = quantized * scale,
            where scale = max |row| / divisor, rounded to bfloat16. The divisor is 127 for int8; for
            fp8 it is one of 448, 416, 384, 352, 320, 288 and 256, chosen per row for the smallest
            sum of squared errors. In a row with a NaN or an infinity no element decodes to a finite
            number.
        value_scales: scales of value_pool, like key_scales.

    Returns:
        [8] uint32, the fence of this write.

    Raises:
        ValueError: shapes or dtypes are invalid.
    """
    rows = _Rows(keys, values, slot_mapping, key_pool, value_pool, after, key_scales, value_scales)
    _check(rows)
    if keys.shape[0] == 0:
        return op_common.merged(after)
    return _launch(rows, queries=None, positions=slot_mapping, rotation=_NO_ROTATION)[1]


def rotate_and_write(
    keys: mx.array,
    values: mx.array | None,
    slot_mapping: mx.array,
    key_pool: mx.array,
    value_pool: mx.array | None,
    after: Sequence[mx.array] = (),
    key_scales: mx.array | None = None,
    value_scales: mx.array | None = None,
    *,
    queries: mx.array | None,
    positions: mx.array,
    rotation: Rotation,
    tails: mx.array | None = None,
) -> tuple[mx.array | None, mx.array]:
    """Rotates keys and queries, then writes as `write` does.

    Args:
        keys: [T, Hkv, D], unrotated; with `tails`, only the elements before the tail.
        values, slot_mapping, key_pool, value_pool, after, key_scales, value_scales: see `write`.
        queries: [T, H, D] in the dtype of keys, unrotated; None: do not rotate queries.
        positions: [T or more] int32 of the rows; 8 or more entries avoid padding.
        rotation: how to rotate keys and queries.
        tails: [T, Hkv, n] in the dtype of keys, the last n elements of each key, beginning with the
            first rotated one. None: keys are complete.

    Returns:
        Rotated queries, [T, H, D], or None; then the fence, [8] uint32.

    Raises:
        ValueError: shapes or dtypes are invalid.
    """
    rows = _Rows(keys, values, slot_mapping, key_pool, value_pool, after, key_scales, value_scales)
    _check_tails(keys, tails, key_pool, rotation)
    _check(rows, tails)
    _check_rotation(keys, queries, positions, rotation, key_pool.shape[3])
    if keys.shape[0] == 0:
        return queries, op_common.merged(after)
    # The kernel rotates in float32 and rounds to the rows' dtype, as `mx.fast.rope` does on a GPU,
    # before it quantizes.
    rotated, fence = _launch(
        rows, queries=queries, positions=positions, rotation=rotation, tails=tails
    )
    return (None if queries is None else rotated), fence


def _launch(
    inputs: _Rows,
    queries: mx.array | None,
    positions: mx.array,
    rotation: Rotation,
    tails: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Returns rotated queries (or an unused array) and the fence."""
    keys, values = inputs.keys, inputs.values
    num_tokens, num_heads, _ = keys.shape
    key_size = inputs.key_pool.shape[3]
    kind, frequencies = rotation.kind, rotation.frequencies
    rows = num_heads + (0 if queries is None else queries.shape[1])
    heads = min(rows, _SIMDGROUPS)
    rotated, fence = _KERNEL(
        inputs=[
            keys,
            # MLX binds every input: unused ones get an array that is already there.
            keys if values is None else values,
            op_common.padded(inputs.slot_mapping.astype(mx.int32), fill=-1),
            inputs.key_pool,
            inputs.key_pool if inputs.value_pool is None else inputs.value_pool,
            op_common.NO_SCALES if inputs.key_scales is None else inputs.key_scales,
            op_common.NO_SCALES if inputs.value_scales is None else inputs.value_scales,
            keys if tails is None else tails,
            keys if queries is None else queries,
            op_common.padded(positions.astype(mx.int32), fill=0),
            _NO_ANGLES if frequencies is None else frequencies,
            rotation.angles if kind.dims else _NO_ANGLES,
            *op_common.fences(inputs.after),
        ],
        template=[
            ("T", keys.dtype),
            ("C", inputs.key_pool.dtype),
            ("KEY_SIZE", key_size),
            ("VALUE_SIZE", key_size if values is None else values.shape[2]),
            ("HAS_VALUES", values is not None),
            ("DIMS", kind.dims),
            ("FIRST", kind.first),
            ("TRADITIONAL", kind.traditional),
            ("LISTED", kind.listed),
        ],
        grid=(_LANES, rows, num_tokens),
        threadgroup=(_LANES, heads, _SIMDGROUPS // heads),
        output_shapes=[
            op_common.FENCE_SHAPE if queries is None else queries.shape,
            op_common.FENCE_SHAPE,
        ],
        output_dtypes=[keys.dtype, op_common.FENCE_DTYPE],
    )
    return rotated, fence


def _check(rows: _Rows, tails: mx.array | None = None) -> None:
    keys, values, key_pool, value_pool = rows.keys, rows.values, rows.key_pool, rows.value_pool
    _check_rows("keys", keys, key_pool, 0 if tails is None else tails.shape[-1])
    if (values is None) != (value_pool is None):
        raise ValueError("values and value_pool: expected both or neither")
    if values is not None and value_pool is not None:
        _check_rows("values", values, value_pool)
        _check_same_layout(keys, values, key_pool, value_pool)
        op_common.check_scales("value_scales", rows.value_scales, value_pool)
    op_common.check_scales("key_scales", rows.key_scales, key_pool)
    _check_numbers("slot_mapping", rows.slot_mapping, keys.shape[0])


def _check_rows(name: str, rows: mx.array, pool: mx.array, more: int = 0) -> None:
    """Checks keys or values against their pool, whose rows are `more` elements longer."""
    part = name.removesuffix("s")
    if rows.ndim != 3 or rows.dtype not in op_common.VALUE_DTYPES:
        raise ValueError(f"{name}: expected [T, Hkv, D] floats, found {rows.shape} {rows.dtype}")
    if 0 < rows.size < kernel.MIN_ELEMENTS:
        raise ValueError(
            f"{name}: expected {kernel.MIN_ELEMENTS} elements or more, found {rows.size}"
        )
    size = rows.shape[2] + more
    if pool.ndim != 4 or (pool.shape[0], pool.shape[3]) != (rows.shape[1], size):
        raise ValueError(
            f"{part}_pool: expected [{rows.shape[1]}, B, block_size, {size}] as {name} "
            f"have it, found {pool.shape}"
        )
    if pool.dtype not in op_common.POOL_DTYPES:
        raise ValueError(f"{part}_pool: expected floats, uint8 or int8, found {pool.dtype}")


def _check_same_layout(
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


def _check_numbers(name: str, numbers: mx.array, num_tokens: int) -> None:
    if numbers.ndim != 1 or numbers.dtype not in (mx.int32, mx.int64):
        raise ValueError(
            f"{name}: expected a flat int32 or int64 array, found {numbers.shape} {numbers.dtype}"
        )
    if numbers.size < num_tokens:
        raise ValueError(
            f"{name}: expected a number for each of {num_tokens} rows, found {numbers.size}"
        )


def _check_tails(
    keys: mx.array, tails: mx.array | None, key_pool: mx.array, rotation: Rotation
) -> None:
    first = rotation.kind.first
    if tails is None:
        if first:
            raise ValueError(f"tails: missing; elements are rotated from index {first} on")
        return
    size = key_pool.shape[-1] - first
    if tails.shape != (*keys.shape[:2], size) or tails.dtype != keys.dtype:
        raise ValueError(
            f"tails: expected {(*keys.shape[:2], size)} of {keys.dtype} as keys are, "
            f"found {tails.shape} of {tails.dtype}"
        )


def _check_rotation(
    keys: mx.array,
    queries: mx.array | None,
    positions: mx.array,
    rotation: Rotation,
    size: int,
) -> None:
    num_tokens = keys.shape[0]
    _check_numbers("positions", positions, num_tokens)
    kind, frequencies = rotation.kind, rotation.frequencies
    if not 0 < kind.dims <= size - kind.first or kind.dims % 2 or kind.first % 2 or kind.first < 0:
        raise ValueError(
            f"rotation: expected an even number of a row's {size} elements, "
            f"found {kind.dims} from {kind.first} on"
        )
    if (frequencies is None) == (rotation.base is None) or kind.listed != (frequencies is not None):
        raise ValueError("rotation: expected frequencies or a base, as its kind has it")
    if frequencies is not None and frequencies.shape != (kind.dims // 2,):
        raise ValueError(
            f"rotation: expected {kind.dims // 2} frequencies, found {frequencies.shape}"
        )
    if queries is None:
        return
    fits = queries.ndim == 3 and (queries.shape[0], queries.shape[2]) == (num_tokens, size)
    if not fits or queries.dtype != keys.dtype:
        raise ValueError(
            f"queries: expected [{num_tokens}, H, {size}] {keys.dtype} as keys are, "
            f"found {queries.shape} {queries.dtype}"
        )
