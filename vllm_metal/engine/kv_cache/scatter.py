# SPDX-License-Identifier: Apache-2.0
"""Writes the KV pool by MLX's own operations, ordered so that MLX never copies the pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

from metal_kernels.kv_gather.reference import decode
from metal_kernels.kv_states import reference as states_reference
from metal_kernels.kv_write.reference import encode
from metal_kernels.op_common import QUANTIZED_DTYPES
from metal_kernels.pace import Pace, pace_of
from metal_kernels.paged_attention import buckets, reference
from metal_kernels.paged_attention.buckets import Bucket, Indices
from vllm_metal.engine.kv_cache.compressed_rows import CompressedRows
from vllm_metal.engine.kv_cache.layer_cache import (
    AttentionKind,
    KVArray,
    KVBackend,
    KVShape,
    LayerKVCache,
)
from vllm_metal.engine.kv_cache.layer_state import Pending, StepLayout, joined
from vllm_metal.engine.kv_cache.separate_prompts import Prompt, SeparatePrompts
from vllm_metal.engine.kv_cache.sparse_tokens import ABSENT, SparseTokens
from vllm_metal.patches.mlx_patches.seam import Scoring


@dataclass(frozen=True)
class ScatterPlan:
    """A step's writes and attention calls, for layers of one KV cache group and kind."""

    slot_mapping: mx.array  # [E + T] int32, those of earlier forwards first, see StepLayout
    attention: buckets.BucketPlan | None  # None: the layers only write
    pace: Pace | None  # where the step's command buffers end; None: where MLX ends them
    num_heads: int  # of K and V
    block_size: int
    group: int  # KV cache group
    num_earlier: int  # E
    prompts: SeparatePrompts | None = None  # MLA prompts, which are not in `attention`
    sparse: SparseTokens | None = None  # tokens of chosen positions, which are in neither
    compressed: CompressedRows | None = None  # reads of layers with compressed entries

    @cached_property
    def indices(self) -> Indices:
        """Head, block and offset of each K or V written, each [(E + T) * Hkv] int32, heads last."""
        rows = self.slot_mapping.size, self.num_heads
        heads = mx.broadcast_to(mx.array(np.arange(self.num_heads, dtype=np.int32)), rows)
        slots = mx.broadcast_to(self.slot_mapping[:, None], rows).flatten()
        return heads.flatten(), *mx.divmod(slots, self.block_size)


class ScatterKVCache(LayerKVCache[ScatterPlan]):
    """Writes with MLX's scatter, attends by gathering the context.

    MLX scatters in place only if nothing else holds the buffer, and a queued read holds it. So
    `write` defers: `begin_step` scatters at the start of the next step, when all reads are done and
    no new one is queued. Within a step, attention takes the step's K/V directly (quantized and
    dequantized if the pool is quantized), and those of earlier forwards submitted together with it.
    """

    pipelined = False
    _pending: tuple[Pending[ScatterPlan], ...] = ()  # deferred K and V, for their plans' slots

    def begin_step(self) -> None:
        if not self._pending:
            return
        written, self._pending = self._pending, ()
        if len(written) == 1:  # the usual case, once per layer
            indices = self._indices(written[0].plan)
            for array, rows in zip(self.arrays, written[0].arrays, strict=True):
                array[indices] = rows.flatten(0, 1)
            return
        slots = [self._indices(each.plan) for each in written]
        indices = tuple(joined(parts) for parts in zip(*slots, strict=True))
        for array, *parts in zip(self.arrays, *(each.arrays for each in written), strict=True):
            array[indices] = joined(parts).flatten(0, 1)

    def _indices(self, plan: ScatterPlan) -> Indices:
        """Returns where the plan's K and V lie in `arrays`."""
        return plan.indices

    def wait_for_device(self) -> None:
        mx.synchronize()  # reads in flight hold the arrays' buffers
        self.begin_step()
        mx.eval(self.arrays)

    def write(self, plan: ScatterPlan, keys: mx.array, values: mx.array) -> None:
        self._input_dtype = keys.dtype
        both = (keys,) if self.values is None else (keys, values)
        encoded = [part for rows in both for part in encode(rows, self.dtype)]
        rows = [part for part in encoded if part is not None]
        if plan.num_earlier:
            rows = self._after_earlier(plan, rows)
        self._pending += (Pending(plan, rows),)

    def _after_earlier(self, plan: ScatterPlan, rows: list[mx.array]) -> list[mx.array]:
        """Prepends K/V of the layer's earlier forwards, padded: [T, ...] become [E + T, ...].

        All forwards that are submitted together have the same shapes, so one graph serves them.
        """
        # Within a group, each layer has its own storage.
        before = [each for each in self._pending if each.plan.group == plan.group]
        self._pending = tuple(each for each in self._pending if each.plan.group != plan.group)
        if before:
            earlier = [part[len(part) - plan.num_earlier :] for part in before[0].arrays]
        else:
            earlier = [mx.zeros((plan.num_earlier, *part.shape[1:]), part.dtype) for part in rows]
        return [joined(parts) for parts in zip(earlier, rows, strict=True)]

    @property
    def inputs(self) -> list[mx.array]:
        """The pool's arrays, and the deferred K and V of earlier forwards."""
        return [*self.arrays, *(array for each in self._pending for array in each.arrays)]

    @contextmanager
    def traced(self, inputs: Sequence[mx.array]) -> Iterator[None]:
        arrays, pending = self.arrays, self._pending
        given = iter(inputs)
        self.arrays = [next(given) for _ in arrays]
        self._pending = tuple(
            Pending(each.plan, [next(given) for _ in each.arrays]) for each in pending
        )
        try:
            yield
        finally:
            self.arrays, self._pending = arrays, pending

    @property
    def outputs(self) -> list[Pending[ScatterPlan]]:
        return list(self._pending)

    @outputs.setter
    def outputs(self, outputs: Sequence[Pending[ScatterPlan]]) -> None:
        self._pending = tuple(outputs)

    def read_states(self, plan: object, blocks: mx.array, width: int) -> mx.array:
        return states_reference.read(self.elements_of(self.arrays), blocks, width, self.split)

    def write_states(self, blocks_np: np.ndarray, states: mx.array) -> None:
        states_reference.write(self.elements_of(self.arrays), blocks_np, states, self.split)

    def attend(self, plan: ScatterPlan, queries: mx.array, scoring: Scoring) -> mx.array:
        assert plan.attention is not None
        newest = self._newest(plan)
        count = len(self.keys.arrays)
        keys = self._as_stored(newest.arrays[:count])
        values = keys if self.values is None else self._as_stored(newest.arrays[count:])
        if plan.pace is not None:
            plan.pace.end(queries)  # the layers before
        held = self.stored_values
        out = reference.run(
            plan.attention,
            queries,
            keys,
            values,
            self.keys.elements,
            held.elements,
            scoring.scale,
            scoring.sinks,
            scoring.softcap,
            key_scales=self.keys.scales,
            value_scales=held.scales,
            pace=plan.pace,
            bias=scoring.bias,
        )
        return out[..., : self.value_size]

    def contexts(
        self, plan: ScatterPlan, prompts: SeparatePrompts
    ) -> list[tuple[mx.array, mx.array]]:
        newest, held = self._newest(plan).arrays, (self.keys, self.values)
        count = len(self.keys.arrays)
        rows = self._as_stored(newest[:count]), self._as_stored(newest[count:] or newest[:count])
        if prompts.pace is not None and prompts.others is None:
            prompts.pace.end(rows[0])  # the layers before
        found = []
        for prompt in prompts.prompts:
            keys, values = (
                part if pool is None else _context(prompt, part, pool)
                for part, pool in zip(rows, held, strict=True)
            )
            found.append((keys, keys if self.values is None else values))
        return found

    def keys_of(self, plan: ScatterPlan, bucket: Bucket) -> mx.array:
        rows = self._newest_keys(plan)
        return reference.context(bucket, rows, self.keys.elements, self.keys.scales, rows.dtype)

    def rows_at(self, plan: ScatterPlan, read_slots: mx.array) -> tuple[mx.array, mx.array]:
        keys = self._rows_at(self.keys, self._newest_keys(plan), read_slots)
        if self.values is None:
            return keys, keys[..., : self.value_size]
        return keys, self._rows_at(self.values, self._newest_values(plan), read_slots)

    def _rows_at(self, pool: KVArray, newest: mx.array, read_slots: mx.array) -> mx.array:
        """Picks rows of the pool, or of this step's [E + T, Hkv, D]; see `rows_at`."""
        num_heads, num_choices = len(pool.elements), read_slots.shape[1]
        heads = mx.arange(num_choices)[:, None] * num_heads // num_choices
        slots, size = mx.maximum(read_slots, 0), pool.elements.shape[-1]
        found = pool.elements.reshape(num_heads, -1, size)[heads, slots]
        if pool.scales is not None:
            found = decode(found, pool.scales.reshape(num_heads, -1)[heads, slots])
            found = found.astype(newest.dtype)
        written = newest[mx.maximum(ABSENT - 1 - read_slots, 0), heads]
        found = mx.where((read_slots >= 0)[..., None], found, written)
        return mx.where((read_slots == ABSENT)[..., None], mx.zeros((), found.dtype), found)

    def _newest_keys(self, plan: ScatterPlan) -> mx.array:
        """Returns this step's keys after quantization, if any, [E + T, Hkv, D]."""
        return self._as_stored(self._newest(plan).arrays[: len(self.keys.arrays)])

    def _newest_values(self, plan: ScatterPlan) -> mx.array:
        return self._as_stored(self._newest(plan).arrays[len(self.keys.arrays) :])

    def _newest(self, plan: ScatterPlan) -> Pending[ScatterPlan]:
        """Returns this step's K and V; layers of other groups may have written, too."""
        return next(each for each in reversed(self._pending) if each.plan is plan)

    def _as_stored(self, encoded: list[mx.array]) -> mx.array:
        """Returns K or V, [T, Hkv, D], quantized and dequantized if the pool is quantized."""
        if self.dtype not in QUANTIZED_DTYPES:
            return encoded[0]
        return decode(*encoded).astype(self._input_dtype)


@dataclass(frozen=True)
class ScatterBackend(KVBackend[ScatterPlan]):
    """KV backend that writes and attends with MLX's operations only."""

    pipelined = False
    defers_writes = True
    gathers = True
    reads_contexts = True

    def allocate(
        self, num_blocks: int, block_size: int, shape: KVShape, dtype: mx.Dtype
    ) -> ScatterKVCache:
        return ScatterKVCache(self, num_blocks, block_size, shape, dtype)

    def plan(self, layout: StepLayout, kind: AttentionKind) -> ScatterPlan:
        on_gpu = mx.default_device().type == mx.DeviceType.gpu
        attention = buckets.plan(
            layout.query_start_loc_np,
            layout.seq_lens_np,
            layout.block_tables_np,
            layout.slot_mapping_np,
            layout.block_size,
            kind.window,
            share=not on_gpu,
            causal=on_gpu,
            earlier_slots=layout.earlier_slots_np,
            bidirectional=kind.bidirectional,
            extent=kind.extent,
        )
        pace = None
        if layout.pace is not None and on_gpu:
            sizes = kind.shape.head_size + kind.shape.value_size
            work = sum(bucket.work(kind.shape.num_heads, sizes) for bucket in attention.buckets)
            pace = pace_of(layout.pace, attention.num_tokens, work)
        return self._plan(layout, attention, pace, kind.shape.num_kv_heads)

    def plan_of_writes(self, layout: StepLayout, num_kv_heads: int) -> ScatterPlan:
        return self._plan(layout, None, None, num_kv_heads)

    def _plan(
        self,
        layout: StepLayout,
        attention: buckets.BucketPlan | None,
        pace: Pace | None,
        num_kv_heads: int,
    ) -> ScatterPlan:
        earlier_np, slots_np = layout.earlier_slots_np, layout.slot_mapping_np
        num_earlier = 0 if earlier_np is None else len(earlier_np)
        if earlier_np is not None:
            slots_np = np.concatenate([earlier_np, slots_np])
        # Padding goes to block 0, vLLM's null block.
        slots = mx.array(np.maximum(slots_np, 0))
        placed = layout.block_size, layout.group, num_earlier
        return ScatterPlan(slots, attention, pace, num_kv_heads, *placed)


SCATTER = ScatterBackend()


def _context(prompt: Prompt, rows: mx.array, pool: KVArray) -> mx.array:
    """Returns K or V of a prompt's context, this step's included, [Hkv, S, D]."""
    found = reference.context(prompt.stored, rows, pool.elements, pool.scales, rows.dtype)
    return found[:, 0, : prompt.context]
