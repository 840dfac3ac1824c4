# SPDX-License-Identifier: Apache-2.0
"""KV pool that our Metal kernels write in place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np

from metal_kernels import (
    kernel,
    kv_blocks,
    kv_gather,
    kv_states,
    kv_write,
    op_common,
    paged_attention,
)
from metal_kernels.kernel import MIN_ELEMENTS
from metal_kernels.kv_write import Rotation
from metal_kernels.layout import PositionLag
from metal_kernels.pace import Pace, pace_of
from metal_kernels.paged_attention import AttentionPlan, Splits, Tiles, prompts
from metal_kernels.paged_attention.buckets import Bucket
from metal_kernels.paged_attention.splits import DEFAULT
from vllm_metal.engine.kv_cache import gathered
from vllm_metal.engine.kv_cache.compressed_rows import CompressedRows
from vllm_metal.engine.kv_cache.gathered import ByMLX, GatheredPlan
from vllm_metal.engine.kv_cache.layer_cache import AttentionKind, KVBackend, KVShape, LayerKVCache
from vllm_metal.engine.kv_cache.layer_state import Fenced, Pending, StepLayout
from vllm_metal.engine.kv_cache.separate_prompts import SeparatePrompts
from vllm_metal.engine.kv_cache.sparse_tokens import SparseTokens
from vllm_metal.patches.mlx_patches.seam import Scoring

ResultT = TypeVar("ResultT")
Launch = Callable[[list[mx.array], int, Sequence[mx.array]], tuple[ResultT, mx.array]]


@dataclass(frozen=True)
class KernelPlan:
    """A step's writes and attention calls, for layers of one KV cache group and kind."""

    slot_mapping: mx.array  # [max(T, MIN_ELEMENTS)] int32
    attention: AttentionPlan | None  # tokens that the kernels serve; None: none
    gathered: GatheredPlan | None  # tokens that MLX's attention serves
    pace: Pace | None  # where the step's command buffers end; None: where MLX ends them
    prompts: SeparatePrompts | None = None  # MLA prompts, which are in neither of the two above
    sparse: SparseTokens | None = None  # tokens of chosen positions, which are in none of these
    compressed: CompressedRows | None = None  # reads of layers with compressed entries

    @property
    def num_tokens(self) -> int:
        plans = (self.attention, self.gathered)
        return sum(plan.num_tokens for plan in plans if plan is not None)

    @property
    def pipeline(self) -> Hashable:
        """Metal pipelines that `attention` launches; gathered contexts always use the same one."""
        return None if self.attention is None else self.attention.pipelines


class KernelKVCache(LayerKVCache[KernelPlan], Fenced):
    """K and V of a layer, written in place: pool arrays are inputs of the writing kernel, too.

    So MLX never copies the pool, but it sees no dependency through it either. Fences order the
    accesses: a write returns a fence that later reads take as input, and reads return fences that
    the next write takes, in this step or the next. So two steps may be queued at once.
    """

    pipelined = True
    backend: KernelBackend

    _written_fence: mx.array | None = None  # fence of the last write
    _write_fences: Sequence[mx.array] = ()  # fences that the next write must wait for
    _newest_plan: object = None  # of the forward that is being built

    def wait_for_device(self) -> None:
        mx.eval(list(self._write_fences))  # MLX knows nothing of kernels in flight
        mx.synchronize()  # a command buffer holds what it binds until its handler has run

    @property
    def fences(self) -> Sequence[mx.array]:
        return self._write_fences

    def write_after(self, fence: mx.array) -> None:
        self._write_fences = [fence]

    def copy_blocks(self, sources_np: np.ndarray, targets_np: np.ndarray) -> None:
        if self.backend.moves_blocks:
            sources_np, targets_np = map(self.rows_of_blocks, (sources_np, targets_np))
            self._write_fences = [
                kv_blocks.copy(self.arrays, sources_np, targets_np, after=self._write_fences)
            ]
            return
        super().copy_blocks(sources_np, targets_np)
        mx.eval(self.arrays)  # kernels are not ordered after MLX's operations in flight

    def clear_blocks(self, blocks_np: np.ndarray) -> None:
        if self.backend.moves_blocks:
            rows_np = self.rows_of_blocks(blocks_np)
            self._write_fences = [kv_blocks.zero(self.arrays, rows_np, after=self._write_fences)]
            return
        self.wait_for_device()
        super().clear_blocks(blocks_np)
        mx.eval(self.arrays)

    @property
    def rotates(self) -> bool:
        return self.backend.rotates

    @property
    def traceable(self) -> bool:
        return self.backend.repeatable and kernel.in_graphs()

    @property
    def inputs(self) -> list[mx.array]:
        """The pool's arrays, and the fence that the forward's first write waits for."""
        fences = self._write_fences
        return [*self.arrays, fences[0] if len(fences) == 1 else op_common.merged(fences)]

    @contextmanager
    def traced(self, inputs: Sequence[mx.array]) -> Iterator[None]:
        arrays, since = self.arrays, self._write_fences
        *self.arrays, fence = inputs
        self._write_fences, self._newest_plan = [fence], None
        try:
            yield
        finally:
            self.arrays, self._write_fences, self._written_fence = arrays, since, None

    @property
    def outputs(self) -> list[Pending[object]]:
        """The fences that the next write must wait for."""
        if self._newest_plan is None:
            return []
        return [Pending(self._newest_plan, list(self._write_fences))]

    @outputs.setter
    def outputs(self, outputs: Sequence[Pending[object]]) -> None:
        for left in outputs:
            self._write_fences = left.arrays

    def read_states(self, plan: object, blocks: mx.array, width: int) -> mx.array:
        self._newest_plan = plan
        states, read = kv_states.read(
            self.elements_of(self.arrays), blocks, width, self.split, after=self._write_fences
        )
        self._write_fences = [read]
        return states

    def write_states(self, blocks_np: np.ndarray, states: mx.array) -> None:
        elements = self.elements_of(self.arrays)
        self._write_fences = [
            kv_states.write(elements, blocks_np, states, self.split, after=self._write_fences)
        ]

    def update_states(self, plan: object, launch: Launch[ResultT]) -> ResultT:
        """Launches a kernel that reads and writes recurrent states, within a forward.

        Args:
            plan: the recurrent layer's plan.
            launch: takes the arrays that hold the states, the number of parts of a block in them
                (`split`), and fences to wait for; returns its results and a fence.
        """
        self._newest_plan = plan
        found, fence = launch(self.elements_of(self.arrays), self.split, self._write_fences)
        self._write_fences = [fence]
        return found

    def write(self, plan: KernelPlan, keys: mx.array, values: mx.array) -> None:
        held = None if self.values is None else values
        self._record_write(plan, values.dtype, kv_write.write(keys, held, *self._pools(plan)))

    def rotate_and_write(
        self,
        plan: KernelPlan,
        keys: mx.array,
        values: mx.array,
        positions: mx.array,
        rotation: Rotation,
        queries: mx.array | None = None,
    ) -> mx.array | None:
        latent = self.values is None
        turned, written = kv_write.rotate_and_write(
            keys,
            None if latent else values,
            *self._pools(plan),
            queries=queries,
            positions=positions,
            rotation=rotation.from_element(keys.shape[-1]) if latent else rotation,
            tails=values if latent else None,
        )
        self._record_write(plan, values.dtype, written)
        return turned

    def _pools(self, plan: KernelPlan) -> tuple[Any, ...]:
        keys, values = self.keys, self.values
        elements, scales = (None, None) if values is None else (values.elements, values.scales)
        return plan.slot_mapping, keys.elements, elements, self._write_fences, keys.scales, scales

    def _record_write(self, plan: KernelPlan, dtype: mx.Dtype, fence: mx.array) -> None:
        self._newest_plan, self._input_dtype = plan, dtype
        self._written_fence, self._write_fences = fence, [fence]

    def attend(self, plan: KernelPlan, queries: mx.array, scoring: Scoring) -> mx.array:
        written = self._written_fence
        assert written is not None  # a layer writes its K/V before it attends
        if plan.pace is not None:
            plan.pace.end(written)  # the layers before
        # Some models pass float32 queries so that products do not overflow; the kernels' never do.
        rows = queries.astype(self._input_dtype)
        outputs: list[mx.array] = []
        reads: Sequence[mx.array] = []
        split, held = plan.gathered, self.stored_values
        if plan.attention is not None:
            scale, sinks, softcap, bias = scoring
            picked = rows if split is None else rows[split.others]
            bias = None if bias is None else bias.astype(rows.dtype)  # its layers are never split
            out, reads = paged_attention.run(
                plan.attention,
                picked,
                *(self.keys.elements, held.elements, written, scale, softcap, sinks),
                *(self.keys.scales, held.scales, plan.pace, bias),
            )
            outputs.append(out)
        if split is not None:
            picked = rows if split.rows is None else rows[split.rows]
            found, read = gathered.run(split, picked, self.keys, held, written, scoring, plan.pace)
            outputs += [out[..., : self.value_size] for out in found]
            reads = [*reads, *read]
        # Reads wait for the write, so their fences replace its fence.
        self._write_fences = [
            *(fence for fence in self._write_fences if fence is not written),
            *reads,
        ]
        out = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
        if split is not None and split.order is not None:
            out = out[split.order]
        return out.astype(queries.dtype)

    def contexts(
        self, plan: KernelPlan, prompts: SeparatePrompts
    ) -> list[tuple[mx.array, mx.array]]:
        written = self._written_fence
        assert written is not None
        if prompts.pace is not None and prompts.others is None:
            prompts.pace.end(written)  # the layers before
        found: list[tuple[mx.array, mx.array]] = []
        for prompt in prompts.prompts:
            parts = []
            for pool in (self.keys,) if self.values is None else (self.keys, self.values):
                table = prompt.stored.block_table, prompt.stored.bounds
                context = self._gathered(pool.elements, pool.scales, *table)
                parts.append(context[:, 0, : prompt.context])
            found.append((parts[0], parts[-1]))
        return found

    def keys_of(self, plan: KernelPlan, bucket: Bucket) -> mx.array:
        keys = self.keys
        return self._gathered(keys.elements, keys.scales, bucket.block_table, bucket.bounds)

    def rows_at(self, plan: KernelPlan, read_slots: mx.array) -> tuple[mx.array, mx.array]:
        pools = (self.keys,) if self.values is None else (self.keys, self.values)
        found = [self._gathered(*gathered.as_rows(pool, read_slots))[0] for pool in pools]
        keys, *values = (rows.reshape(*read_slots.shape, -1) for rows in found)
        return keys, values[0] if values else keys[..., : self.value_size]

    def _gathered(
        self,
        pool: mx.array,
        scales: mx.array | None,
        block_table: mx.array,
        bounds: mx.array | None = None,
    ) -> mx.array:
        """Reads blocks after the layer's write, and before its next one; see kv_gather."""
        written = self._written_fence
        assert written is not None  # a layer writes its K/V before it reads
        found, read = kv_gather.gather(
            pool, block_table, self._input_dtype, [written], scales, bounds
        )
        # Reads wait for the write, so their fences replace its fence.
        self._write_fences = [
            *(fence for fence in self._write_fences if fence is not written),
            read,
        ]
        return found


@dataclass(frozen=True)
class KernelBackend(KVBackend[KernelPlan]):
    """KV backend of our Metal kernels, for those that passed their checks and are fastest."""

    pipelined = True

    #: Tiles that attention may use, by kind of layer; all if missing.
    tiles: Mapping[AttentionKind, Tiles] = field(default_factory=dict)
    #: Requests that MLX's attention serves over gathered contexts, by kind of layer.
    by_mlx: Mapping[AttentionKind, ByMLX] = field(default_factory=dict)
    splits: Splits = DEFAULT  # how contexts are split
    #: Whether the kernel copies and clears whole blocks; else MLX's operations do.
    moves_blocks: bool = True
    #: Whether compiled graphs with our kernels give the same results as new ones.
    repeatable: bool = True
    #: Whether kernels compute recurrent layers, in the blocks that hold their states.
    computes_states: bool = True
    #: Fewest prompt tokens for which MLX's chunked delta rule is faster; None: never.
    long_prompt: int | None = None
    reads_contexts: bool = True
    rotates: bool = True

    @property
    def gathers(self) -> bool:
        return any(self.by_mlx.values())

    def allocate(
        self, num_blocks: int, block_size: int, shape: KVShape, dtype: mx.Dtype
    ) -> KernelKVCache:
        return KernelKVCache(self, num_blocks, block_size, shape, dtype)

    def plan(self, layout: StepLayout, kind: AttentionKind) -> KernelPlan:
        attention, split, work = None, None, 0
        by_mlx = self.by_mlx.get(kind)
        if by_mlx and (requests := gathered.select(layout, by_mlx)).any():
            split = gathered.plan(layout, requests, kind, by_mlx.force_fused)
            work = split.work(kind)
            if not requests.all():
                lag = layout.lag and layout.lag.of(np.flatnonzero(~requests))
                attention = self._attention(*layout.arrays_without(requests), layout, lag, kind)
        else:
            attention = self._attention_of_all(layout, kind)
        work += 0 if attention is None else attention.work
        pace = layout.pace
        # Layers that share a command buffer would hold all their gathered contexts at once.
        if pace is not None and (split is None or split.prompts is None):
            pace = pace_of(pace, int(layout.query_start_loc_np[-1]), work)
        return KernelPlan(layout.padded_slots, attention, split, pace)

    def _attention_of_all(self, layout: StepLayout, kind: AttentionKind) -> AttentionPlan:
        """Plans the attention of all tokens by kernels; `StepLayout.attention` keeps the plan."""
        key = kind, id(self)  # a pool has one backend, tests compare several
        if (found := layout.attention.get(key)) is not None:
            return found
        if kind.bidirectional:  # a drafter's block; the target verifies the same tokens
            causal = kind._replace(bidirectional=False)
            found = self._attention_of_all(layout, causal).seeing_later_rows
        if found is None:
            rows = layout.query_start_loc_np, layout.seq_lens_np, layout.block_tables_np
            found = self._attention(*rows, layout, layout.lag, kind)
        layout.attention[key] = found
        return found

    def _attention(
        self,
        query_start_loc_np: np.ndarray,
        seq_lens_np: np.ndarray,
        block_tables_np: np.ndarray,
        layout: StepLayout,
        lag: PositionLag | None,
        kind: AttentionKind,
    ) -> AttentionPlan:
        """Plans the attention of some of a layout's requests by kernels."""
        return paged_attention.plan(
            *(query_start_loc_np, seq_lens_np, block_tables_np, kind.shape, kind.window),
            self._tiles_of(kind),
            lag=lag,
            splits=self.splits,
            block_size=layout.block_size,
            bidirectional=kind.bidirectional,
            extent=kind.extent,
        )

    def plan_of_writes(self, layout: StepLayout, num_kv_heads: int) -> KernelPlan:
        return KernelPlan(layout.padded_slots, None, None, None)

    def trials(self, kind: AttentionKind, block_size: int) -> Iterator[KernelPlan]:
        tiles = self._tiles_of(kind)
        for trial in paged_attention.trials(kind.shape, kind.window, tiles, kind.extent):
            slots = _padded(np.arange(trial.num_tokens, dtype=np.int32))
            yield KernelPlan(slots, trial, None, None)
        by_mlx = self.by_mlx.get(kind, ByMLX())
        counts = (1 if by_mlx.decodes else None, by_mlx.fewest_rows)
        for num_rows in (count for count in counts if count is not None):
            layout = _trial_of(num_rows, block_size)
            split = gathered.plan(layout, np.ones(1, bool), kind, by_mlx.force_fused)
            yield KernelPlan(_padded(layout.slot_mapping_np), None, split, None)

    def waiting(
        self, kind: AttentionKind, context: int, num_tokens: int, dtype: mx.Dtype
    ) -> tuple[int, int]:
        fewest_rows = self.by_mlx.get(kind, ByMLX()).fewest_rows
        if fewest_rows is None:
            return 0, 0
        slots = context if kind.window is None else min(context, kind.window + num_tokens)
        most = max(num_tokens // fewest_rows, 1)
        return prompts.waiting_bytes(kind.shape, slots, most, dtype), fewest_rows

    def _tiles_of(self, kind: AttentionKind) -> Tiles:
        causal = kind._replace(bidirectional=False)
        return self.tiles.get(causal) or Tiles.for_layer(kind.shape, kind.window)


KERNELS = KernelBackend()


def _trial_of(num_rows: int, block_size: int) -> StepLayout:
    """One request of `num_rows` tokens, in the first blocks of the pool."""
    slots = np.arange(num_rows, dtype=np.int32)
    table = np.arange(-(-num_rows // block_size), dtype=np.int32)[None]
    starts, lens = np.array([0, num_rows], np.int32), np.array([num_rows], np.int32)
    return StepLayout(starts, lens, table, slots, block_size)


def _padded(slots: np.ndarray) -> mx.array:
    """Pads to MIN_ELEMENTS slots: MLX gives kernels another signature for smaller arrays."""
    return mx.array(np.pad(slots, (0, max(0, MIN_ELEMENTS - len(slots))), constant_values=-1))
