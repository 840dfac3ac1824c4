# SPDX-License-Identifier: Apache-2.0
"""The pool by our own kernels, which write into it in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels import kv_blocks, kv_write, paged_attention
from metal_kernels.paged_attention import AttentionPlan, AttentionShape
from vllm_metal.kv_cache.region import Region, StepLayout


@dataclass(frozen=True)
class KernelPlan:
    """A step of one group, shape and window."""

    slot_mapping: mx.array  # [max(T, 8)] int32
    attention: AttentionPlan


class KernelRegion(Region):
    """The pool arrays are inputs of every kernel, also of the one that writes through them.

    So MLX never copies them, and orders nothing by them either: tokens do. A write returns one that
    the reads after it take as an input; the reads return theirs, which the next write takes, in
    this step or the next. Two steps may thus be queued at once.
    """

    pipelined = True
    gathers = False

    def __init__(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: mx.Dtype
    ) -> None:
        super().__init__(num_blocks, block_size, num_kv_heads, head_size, dtype)
        self._written: mx.array | None = None  # token of the last write
        self._read: Sequence[mx.array] = ()  # tokens of what the next write must come after

    @staticmethod
    def plan(layout: StepLayout, shape: AttentionShape, window: int | None) -> KernelPlan:
        attention = paged_attention.plan(
            layout.query_start_loc_np, layout.seq_lens_np, layout.block_tables_np, shape, window
        )
        slots = layout.slot_mapping_np
        # Padded once a step here: a kernel takes fewer than eight by another signature.
        padded = np.pad(slots, (0, max(0, 8 - len(slots))), constant_values=-1)
        return KernelPlan(mx.array(padded), attention)

    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        self._read = [kv_blocks.copy(self.arrays, sources, targets, after=self._read)]

    def zero_blocks(self, blocks: np.ndarray) -> None:
        self._read = [kv_blocks.zero(self.arrays, blocks, after=self._read)]

    def write(
        self, plan: KernelPlan, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        self._written = kv_write.write(
            keys,
            values,
            plan.slot_mapping,
            self.keys.elements,
            self.values.elements,
            after=self._read,
            key_scales=self.keys.scales,
            value_scales=self.values.scales,
        )
        return keys, values

    def attend(
        self,
        plan: KernelPlan,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        assert self._written is not None  # a layer writes its K/V before it attends
        out, self._read = paged_attention.run(
            plan.attention,
            queries,
            self.keys.elements,
            self.values.elements,
            self._written,
            scale,
            sinks=sinks,
            key_scales=self.keys.scales,
            value_scales=self.values.scales,
        )
        return out
