# SPDX-License-Identifier: Apache-2.0
"""The pool by plain MLX operations, without it ever being copied."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels.paged_attention import AttentionShape, reference
from vllm_metal.kv_cache.region import Region, StepLayout


@dataclass(frozen=True)
class ScatterPlan:
    """A step of one group, shape and window."""

    slot_mapping: mx.array  # [T] int32
    attention: reference.AttentionPlan


class ScatterRegion(Region):
    """Writes by MLX's scatter, attends by gathering the context.

    MLX scatters in place only while nothing else holds the buffer, and a queued read holds it. So
    `write` only keeps a step's K/V, and `begin_step` scatters them at the start of the next step,
    once the reads before it have run and before any new one is queued; within a step attention
    takes fresh K/V directly.
    """

    pipelined = False

    def __init__(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: mx.Dtype
    ) -> None:
        super().__init__(num_blocks, block_size, num_kv_heads, head_size, dtype)
        self._pending: list[tuple[mx.array, mx.array, mx.array]] = []

    @staticmethod
    def plan(layout: StepLayout, shape: AttentionShape, window: int | None) -> ScatterPlan:
        attention = reference.plan(
            layout.query_start_loc_np,
            layout.seq_lens_np,
            layout.block_tables_np,
            layout.slot_mapping_np,
            layout.block_size,
            window,
        )
        return ScatterPlan(mx.array(layout.slot_mapping_np), attention)

    def begin_step(self) -> None:
        if not self._pending:
            return
        slots, keys, values = (
            parts[0] if len(parts) == 1 else mx.concatenate(list(parts))
            for parts in zip(*self._pending, strict=True)
        )
        self._pending.clear()
        self.keys = _scatter(self.keys, slots, keys)
        self.values = _scatter(self.values, slots, values)

    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        copied = [pool[:, mx.array(sources)] for pool in (self.keys, self.values)]
        mx.eval(copied)  # a queued read would have the whole pool copied
        self._put(targets, copied[0], copied[1])

    def zero_blocks(self, blocks: np.ndarray) -> None:
        zero = mx.zeros((), self.keys.dtype)
        self._put(blocks, zero, zero)

    def _put(self, blocks: np.ndarray, keys: mx.array, values: mx.array) -> None:
        self.keys[:, mx.array(blocks)] = keys
        self.values[:, mx.array(blocks)] = values

    def write(self, plan: ScatterPlan, keys: mx.array, values: mx.array) -> None:
        self._pending.append((plan.slot_mapping, keys, values))

    def attend(
        self,
        plan: ScatterPlan,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        return reference.run(
            plan.attention, queries, keys, values, self.keys, self.values, scale, sinks
        )


def _scatter(pool: mx.array, slots: mx.array, rows: mx.array) -> mx.array:
    num_heads, num_blocks, block_size, head_size = pool.shape
    flat = pool.reshape(-1, head_size)
    starts = mx.arange(num_heads, dtype=mx.int32) * (num_blocks * block_size)
    flat[slots + starts[:, None]] = rows.swapaxes(0, 1).astype(pool.dtype)
    return flat.reshape(pool.shape)
