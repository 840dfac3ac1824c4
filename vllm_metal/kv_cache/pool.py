# SPDX-License-Identifier: Apache-2.0
"""The pool arrays, and how K/V get into them without the pool ever being copied."""

from __future__ import annotations

import mlx.core as mx


class Region:
    """K and V of one layer, or of one layer of each KV cache group, for every block of the pool.

    MLX scatters in place only while nothing else holds the buffer, and a queued read holds it. So
    `write` only keeps a step's K/V, and `flush` scatters them at the start of the next step, once
    the reads before it have run and before any new one is queued; within a step attention takes
    fresh K/V directly. Groups share regions soundly: a block belongs to one group at a time.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: mx.Dtype
    ) -> None:
        # Head outermost: what attention gathers of a head is then in one piece.
        shape = (num_kv_heads, num_blocks, block_size, head_size)
        self.keys = mx.zeros(shape, dtype)  # [Hkv, B, block_size, D]
        self.values = mx.zeros(shape, dtype)  # [Hkv, B, block_size, D]
        self._pending: list[tuple[mx.array, mx.array, mx.array]] = []

    def write(self, slot_mapping: mx.array, keys: mx.array, values: mx.array) -> None:
        """Keeps K/V, each [T, Hkv, D], for the slots [T] int32 (block * block_size + offset)."""
        self._pending.append((slot_mapping, keys, values))

    def flush(self) -> None:
        """Scatters what was kept since the last flush; call it before a step's first read."""
        if not self._pending:
            return
        slots, keys, values = (
            parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
            for parts in zip(*self._pending, strict=True)
        )
        self._pending.clear()
        self.keys = _scatter(self.keys, slots, keys)
        self.values = _scatter(self.values, slots, values)


def _scatter(pool: mx.array, slots: mx.array, rows: mx.array) -> mx.array:
    num_heads, num_blocks, block_size, head_size = pool.shape
    flat = pool.reshape(-1, head_size)
    starts = mx.arange(num_heads, dtype=mx.int32) * (num_blocks * block_size)
    flat[slots + starts[:, None]] = rows.swapaxes(0, 1).astype(pool.dtype)
    return flat.reshape(pool.shape)
