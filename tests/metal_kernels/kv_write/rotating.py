# SPDX-License-Identifier: Apache-2.0
"""Rotating writes of random rows, and the formula of a rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from metal_kernels import kv_write
from metal_kernels.kv_write import Rotation, RotationKind
from metal_kernels.op_common import QUANTIZED_DTYPES

_HEADS, _QUERY_HEADS, _BLOCK, _BLOCKS = 2, 4, 16, 3


def rotated(rows: mx.array, positions: mx.array, rotation: Rotation) -> np.ndarray:
    """Returns [T, H, D] float64 by the formula: pairs as complex numbers times exp(i angle)."""
    kind = rotation.kind
    found = np.array(rows.astype(mx.float32)).astype(np.float64)
    pairs = np.arange(kind.dims // 2)
    if kind.listed:
        frequencies = np.array(rotation.frequencies).astype(np.float64)
    else:
        assert rotation.base is not None
        frequencies = rotation.base ** (2 * pairs / kind.dims)
    places = np.array(positions)[: len(rows), None, None]
    turn = np.exp(1j * rotation.scale * places / frequencies)
    if kind.traditional:
        first, second = kind.first + 2 * pairs, kind.first + 2 * pairs + 1
    else:
        first, second = kind.first + pairs, kind.first + pairs + kind.dims // 2
    turned = (found[..., first] + 1j * found[..., second]) * turn
    found[..., first], found[..., second] = turned.real, turned.imag
    return found


class Rotating:
    """A write of random rows at positions up to 60, whose angles are exact enough in float32."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        dtype: mx.Dtype,
        pool_dtype: mx.Dtype,
        kind: RotationKind,
        slots: Sequence[int],
        scale: float = 0.75,
    ) -> None:
        """`sizes`: head sizes of K and V; only K's for latents."""
        rng = np.random.default_rng(0)
        self.dtype, self.pool_dtype, self.slots = dtype, pool_dtype, slots
        listed = mx.array((3 * 1e4 ** (np.arange(kind.dims // 2) / 40)).astype(np.float32))
        by = (None, listed) if kind.listed else (1e4, None)
        self.rotation = Rotation(kind, scale, *by)
        self.positions = mx.array(rng.integers(0, 60, len(slots)), mx.int32)

        def rows(heads: int, size: int) -> mx.array:
            drawn = rng.normal(size=(len(slots), heads, size)).astype(np.float32)
            return mx.array(drawn).astype(dtype)

        self.keys = rows(_HEADS, sizes[0])
        self.values = rows(_HEADS, sizes[1]) if len(sizes) > 1 else None
        self.queries = rows(_QUERY_HEADS, sizes[0]) if not kind.first else None
        coded = pool_dtype in QUANTIZED_DTYPES
        places = _HEADS, _BLOCKS, _BLOCK
        self._pools = [mx.zeros((*places, size), pool_dtype) for size in sizes]
        self._scales = [mx.zeros(places, mx.bfloat16) if coded else None for _ in sizes]
        mx.eval(self._pools)

    def rows(self) -> dict[str, Any]:
        slots = mx.array(np.array(self.slots, np.int32))
        return {"keys": self.keys, "values": self.values, "slot_mapping": slots}

    def pools(self) -> dict[str, Any]:
        of_values = (self._pools[1], self._scales[1]) if self.values is not None else (None, None)
        return {
            "key_pool": self._pools[0],
            "value_pool": of_values[0],
            "key_scales": self._scales[0],
            "value_scales": of_values[1],
        }

    def arguments(self) -> dict[str, Any]:
        found = self.rows() | self.pools() | {"queries": self.queries}
        found |= {"positions": self.positions, "rotation": self.rotation}
        if first := self.rotation.kind.first:
            found["keys"], found["tails"] = mx.split(self.keys, [first], axis=-1)
        return found

    def write(self) -> mx.array | None:
        """Writes; returns rotated queries."""
        queries, fence = kv_write.rotate_and_write(**self.arguments())
        assert not np.array(fence).any()
        return queries

    def _held(self, part: int) -> mx.array:
        pool, scales = self._pools[part], self._scales[part]
        values = mx.from_fp8(pool, mx.float32) if pool.dtype == mx.uint8 else pool
        if scales is not None:
            values = values * scales[..., None].astype(mx.float32)
        flat = values.astype(mx.float32).flatten(1, 2)
        return flat[:, mx.array([slot for slot in self.slots if slot >= 0])].swapaxes(0, 1)

    def held_keys(self) -> mx.array:
        """[t, Hkv, D] float32 of the rows that have a slot."""
        return self._held(0)

    def steps(self) -> np.ndarray:
        """[T, Hkv, 1]: tolerance of quantized values in a quantized pool."""
        largest = np.abs(np.array(self.keys.astype(mx.float32))).max(axis=-1, keepdims=True)
        return largest * 1.5 * (1 / 127 if self.pool_dtype == mx.int8 else 1 / 14)

    def check_values(self) -> None:
        """Checks that values are written unchanged."""
        if self.values is None or self.pool_dtype in QUANTIZED_DTYPES:
            return
        written = mx.array([row for row, slot in enumerate(self.slots) if slot >= 0])
        wanted = self.values[written].astype(self.pool_dtype)
        assert mx.array_equal(self._held(1), wanted.astype(mx.float32))
