# SPDX-License-Identifier: Apache-2.0
"""KV cache of a layer with full or sliding-window attention: spec, storage, kernels, profiling."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
import numpy as np
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    SlidingWindowSpec,
)

from metal_kernels import paged_attention
from metal_kernels.kernel import MIN_ELEMENTS
from metal_kernels.kv_write import Rotation, RotationKind
from metal_kernels.layout import BLOCK_SIZES
from metal_kernels.paged_attention import AttentionShape, buckets
from metal_kernels.selfcheck import CHOICES, Case
from vllm_metal.engine.attention import bidirectional, latent_heads, sparse
from vllm_metal.engine.attention.latent_heads import Projections
from vllm_metal.engine.attention.paged_cache import (
    LatentCache,
    LayerRotation,
    PagedCache,
    SharedCache,
)
from vllm_metal.engine.kv_cache import formats, sparse_tokens
from vllm_metal.engine.kv_cache.latent_prompts import LatentHeads, planned
from vllm_metal.engine.kv_cache.layer_cache import (
    AttentionKind,
    KVBackend,
    KVShape,
    LayerKVCache,
    Scoring,
    TrialPlan,
    parts_of,
    row_bytes,
)
from vllm_metal.engine.kv_cache.layer_state import (
    LayerState,
    PlanT,
    StepLayout,
    StepScope,
    Storage,
)
from vllm_metal.engine.kv_cache.packed import heads_of
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.separate_prompts import SeparatePrompts
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer, StepBounds

#: Kernels of attention layers, and timings that compare them with MLX's operations.
_KERNELS = (
    *("kv_write", "kv_gather", "kv_blocks", "decode", "prefill", "reduce", "graph", "gathered"),
    *CHOICES,
)
_TRIAL_BLOCKS = 8  # blocks of at least 16 tokens: enough for the largest tile


@dataclass(frozen=True)
class AttentionLayer(StatefulLayer):
    """The KV cache of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int | None  # positions a query sees, itself included; None: no sliding window
    sinks: mx.Dtype | None = None  # dtype of attention sinks; None: there are none
    value_size: int | None = None  # size of V's heads if it differs from K's
    readers: int = 0  # number of layers without K/V of their own that attend to this layer's
    latent: bool = False  # MLA (arXiv:2405.04434): values are the first elements of keys
    softcap: float | None = None  # soft cap of scores
    heads: LatentHeads | None = None  # MLA heads
    rotation: LayerRotation | None = None  # RoPE that the write can apply for the layer
    bidirectional: bool = False  # whether tokens see later ones of their request in the same step
    is_auxiliary: bool = False  # see StatefulLayer
    extent: int | None = None  # distances with a relative bias; None: no bias
    #: Most positions that a token attends to, chosen by an indexer (index_layer.py); None: all.
    topk: int | None = None
    choices: int = 1  # different choices per token, each for as many heads

    @property
    def shape(self) -> AttentionShape:
        sizes = self.head_size, self.value_size or self.head_size
        return AttentionShape(self.num_heads, self.num_kv_heads, *sizes)

    @cached_property
    def kind(self) -> Hashable:
        if self.topk is None:
            return self._attention
        return self._attention, self.topk, self.choices

    @cached_property
    def _attention(self) -> AttentionKind:
        return AttentionKind(self.shape, self.window, self.bidirectional, self.extent)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_size, self.shape.value_size

    @property
    def storage_key(self) -> KVShape:
        return KVShape(self.num_kv_heads, self.head_size, self.shape.value_size, self.latent)

    def _zero_rows(self, num_tokens: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        heads, key_size, value_size, _ = self.storage_key
        rows = (mx.zeros((num_tokens, heads, size), dtype) for size in (key_size, value_size))
        return next(rows), next(rows)

    @property
    def context(self) -> Hashable:
        """Positions that a query sees, itself included; None: all (no sliding window)."""
        return self.window

    def spec(self, block_size: int, elements: mx.Dtype, whole_context: bool = False) -> KVCacheSpec:
        family: Callable[..., KVCacheSpec] = FullAttentionSpec
        if self.window is not None and not whole_context:
            family = partial(SlidingWindowSpec, sliding_window=self.window)
        pool = formats.pool_format(elements)
        return family(
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=pool.torch_dtype,
            kv_quant_mode=KVQuantMode[pool.quant_mode],
            # K and V, with their scales.
            state_content_bytes=sum(row_bytes(size, elements) for size in self._row_sizes),
        )

    @property
    def _row_sizes(self) -> tuple[int, ...]:
        """Elements stored per token and K/V head."""
        return (self.head_size,) if self.latent else (self.head_size, self.shape.value_size)

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        elements: mx.Dtype,
        backend: KVBackend,
    ) -> LayerKVCache:
        return backend.allocate(num_blocks, block_size, self.storage_key, elements)

    def share(self, storage: Storage, part: int = 0) -> LayerKVCache:
        return heads_of(storage, part * self.num_kv_heads, self.num_kv_heads)

    def pack(self, count: int) -> AttentionLayer:
        heads = count * self.num_heads, count * self.num_kv_heads
        return replace(self, num_heads=heads[0], num_kv_heads=heads[1])

    def room(self, block_size: int, elements: mx.Dtype) -> int:
        return block_size * self.num_kv_heads * sum(self._row_sizes) * elements.size

    def scope(self, state: LayerState) -> StepScope:
        assert isinstance(state, LayerKVCache)
        plan_of = partial(state.backend.plan, kind=self._attention)
        heads = self._expanded_heads(state.backend)

        def of_step(layout: StepLayout) -> Any:
            layout = layout.split(state.split)
            if bidirectional.has_runs(layout, self.window):
                return bidirectional.planned(layout, self.window, plan_of)
            of_latents = partial(planned, heads=heads, plan_of=plan_of)
            if self.topk is None:
                return of_latents(layout)
            work = self.topk * sparse.work(*self._sizes)
            contexts_of = state.backend.plan_of_contexts
            return sparse_tokens.planned(layout, self.topk, of_latents, contexts_of, work)

        return StepScope(of_step)

    def _expanded_heads(self, backend: KVBackend) -> LatentHeads | None:
        """Returns sizes of MLA heads if prompts may expand latents to K and V, else None."""
        if self.heads is None or self.heads.fewest_rows is None or self.window is not None:
            return None
        return self.heads if backend.reads_contexts else None

    def cache(self, state: LayerState, scope: StepScope) -> PagedCache:
        assert isinstance(state, LayerKVCache)
        if self.readers:
            return SharedCache(state, scope, self.rotation)
        return (LatentCache if self.latent else PagedCache)(state, scope, self.rotation)

    def unsupported(self, dtype: mx.Dtype, block_size: int) -> str | None:
        return paged_attention.unsupported(self.shape, dtype, block_size // parts_of(block_size))

    def cases(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        host: StatefulLayer | None = None,
    ) -> list[Case]:
        size = block_size // parts_of(block_size)
        kind = (self.shape, dtype, elements, size, self.window)
        # MLX's attention serves no such layers, so there is nothing to time.
        alone = self.bidirectional or self.extent is not None
        kernels = _KERNELS[: -len(CHOICES)] if alone else _KERNELS
        if self.extent is not None:
            kernels = tuple(name for name in kernels if name != "gathered")
        scoring = (True, self.softcap, self.extent)
        cases = [Case(*kind, *scoring, kernels=kernels)]
        if self.rotation is not None:
            by = self._rotation_kind
            cases.append(Case(*kind[:-1], kernels=("rotation",), rotation=by))
        return cases

    @property
    def _rotation_kind(self) -> RotationKind | None:
        """The rotation of a key as stored in the pool, where MLA's rotated part comes last."""
        if self.rotation is None:
            return None
        first = self.head_size - self.rotation.kind.dims if self.latent else 0
        return self.rotation.kind._replace(first=first)

    def trials(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        backend: KVBackend,
        host: StatefulLayer | None = None,
    ) -> Iterator[tuple[Hashable, Callable[[], mx.array]]]:
        kv_cache: LayerKVCache | None = None
        size = block_size // parts_of(block_size)
        for trial in backend.trials(self._attention, size):
            first = kv_cache is None
            if kv_cache is None:
                kv_cache = self.allocate(_TRIAL_BLOCKS, size, elements, backend)
            written = self.rotation if first else None  # all others write the same way
            variant = self.softcap is None, self.extent is None
            pipeline = (self.shape, self.sinks, *variant, trial.pipeline, written)
            yield pipeline, partial(self._attend_once, kv_cache, trial, dtype, first)
        if kv_cache is not None and self.topk is not None:
            once = partial(self._attend_to_chosen, 1, 1, dtype, elements, backend)
            yield (self.kind, elements), once
        if kv_cache is not None and (heads := self._expanded_heads(backend)):
            yield (self.shape, heads), partial(self._expand_once, kv_cache, heads, dtype, size)

    def _attend_once(
        self,
        kv_cache: LayerKVCache,
        trial: TrialPlan,
        dtype: mx.Dtype,
        moving_blocks: bool,
    ) -> mx.array:
        if moving_blocks:
            kv_cache.clear_blocks(np.array([1], np.int32))
            kv_cache.copy_blocks(np.array([0], np.int32), np.array([1], np.int32))
        self._write_once(kv_cache, trial, trial.num_tokens, dtype)
        queries = mx.zeros((trial.num_tokens, self.num_heads, self.head_size), dtype)
        bias = self._zero_bias(trial.num_tokens, dtype)
        scoring = Scoring(1.0, self._zero_sinks(), self.softcap, bias)
        return kv_cache.attend(trial, queries, scoring)

    def _zero_sinks(self) -> mx.array | None:
        return None if self.sinks is None else mx.zeros(self.num_heads, self.sinks)

    def _zero_bias(self, num_tokens: int, dtype: mx.Dtype) -> mx.array | None:
        if self.extent is None:
            return None
        return mx.zeros((num_tokens, self.num_heads, self.extent), dtype)

    def _write_once(
        self, kv_cache: LayerKVCache[PlanT], plan: PlanT, num_tokens: int, dtype: mx.Dtype
    ) -> None:
        """Writes zeros for `num_tokens` tokens in the way a step writes K and V."""
        keys, values = self._zero_rows(num_tokens, dtype)
        if self.rotation is None or not kv_cache.rotates:
            kv_cache.write(plan, keys, values)
            return
        kind, queries = self.rotation.kind, None
        if self.latent:
            keys, values = mx.split(keys, [self.head_size - kind.dims], axis=-1)
        if self.rotation.queries:
            queries = mx.zeros((num_tokens, self.num_heads, self.head_size), dtype)
        positions = mx.zeros(max(num_tokens, MIN_ELEMENTS), mx.int32)
        by = Rotation.of_zeros(kind)
        kv_cache.rotate_and_write(plan, keys, values, positions, by, queries)

    def _expand_once(
        self, kv_cache: LayerKVCache, heads: LatentHeads, dtype: mx.Dtype, block_size: int
    ) -> mx.array:
        layout = layout_of_long_contexts(1, block_size, block_size, block_size)
        plan = kv_cache.backend.plan(layout, self._attention)
        self._write_once(kv_cache, plan, block_size, dtype)
        prompts = SeparatePrompts.of(layout, np.ones(1, bool))
        (((context,), _),) = kv_cache.contexts(plan, prompts)
        rows = mx.zeros((block_size, heads.num_heads, heads.key + heads.rotated), dtype)
        made = Projections.of_zeros(heads, dtype)
        return latent_heads.attend(rows, context, made, Scoring(1.0))

    def _attend_to_chosen(
        self, num_rows: int, topk: int, dtype: mx.Dtype, elements: mx.Dtype, backend: KVBackend
    ) -> mx.array:
        """Runs up to three calls of `num_rows` tokens that attend to `topk` positions each."""
        kv_cache = self.allocate(1, BLOCK_SIZES[0], elements, backend)
        layout = layout_of_long_contexts(1, 1, 1, BLOCK_SIZES[0])
        plan = backend.plan_of_writes(layout, self.num_kv_heads)
        self._write_once(kv_cache, plan, 1, dtype)
        queries = mx.zeros((num_rows, self.num_heads, self.head_size), dtype)
        read_slots = mx.zeros((num_rows, self.choices, topk), mx.int32)
        mx.eval(read_slots)  # an indexer's choice for all rows
        most = max(self.choices, self.num_kv_heads)
        some = 3 * sparse.rows_per_call(kv_cache, queries, most, topk)
        scoring = Scoring(1.0, self._zero_sinks())
        return sparse.attend(kv_cache, plan, queries[:some], read_slots[:some], scoring, None)

    def gathers(self, backend: KVBackend) -> bool:
        return self.topk is not None or backend.gathers or self._expanded_heads(backend) is not None

    def profile(
        self,
        context: int,
        bounds: StepBounds,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        backend: KVBackend,
    ) -> None:
        """Runs a prefill chunk over one long context, many decodes, and the expansion of latents.

        During these calls, memory is allocated for contexts that other queued layers may have
        gathered. Gathering calls are bounded (metal_kernels.paged_attention.buckets), so this
        finds the peak.
        """
        if self.topk is not None and context > self.topk:
            rows = min(bounds.num_tokens, context - self.topk)
            # Without kernels, which `fit` cannot launch; a kernel gathers with fewer copies.
            mx.eval(self._attend_to_chosen(rows, self.topk, dtype, elements, SCATTER))
            context = self.topk  # context of tokens that attend to all positions
        if heads := self._expanded_heads(backend):
            mx.eval(latent_heads.largest_call(heads, context, bounds.num_tokens, dtype))
        if not backend.gathers:
            return
        nbytes, rows = backend.waiting(self._attention, context, bounds.num_tokens, dtype)
        waiting = [mx.zeros(nbytes, mx.uint8)]
        if (bias := self._zero_bias(bounds.num_tokens, dtype)) is not None:
            waiting.append(bias)
        mx.eval(waiting)  # while the calls below are measured
        chunk = max(buckets.MAX_SCORES // context, buckets.MIN_ROWS, rows)
        many = max(buckets.MAX_GATHERED // context, 1)
        for num_reqs, num_rows in (
            (1, min(bounds.num_tokens, context, chunk)),
            (min(bounds.max_num_seqs, many), 1),
        ):
            layout = layout_of_long_contexts(num_reqs, num_rows, context, bounds.block_size)
            num_blocks = int(layout.block_tables_np.max()) + 1
            kv_cache = self.allocate(num_blocks, bounds.block_size, elements, backend)
            plan = kv_cache.backend.plan(layout.split(kv_cache.split), self._attention)
            self._write_once(kv_cache, plan, num_reqs * num_rows, dtype)
            queries = mx.zeros((num_reqs * num_rows, self.num_heads, self.head_size), dtype)
            some = None if bias is None else bias[: num_reqs * num_rows]
            mx.eval(kv_cache.attend(plan, queries, Scoring(1.0, None, self.softcap, some)))


def layout_of_long_contexts(
    num_reqs: int, num_rows: int, context: int, block_size: int
) -> StepLayout:
    """Lays out the last tokens of long contexts, which share block 0 but for written blocks."""
    written = -(-num_rows // block_size) + 1
    table = np.zeros((num_reqs, -(-context // block_size)), np.int32)
    own = 1 + np.arange(num_reqs * (written + 1), dtype=np.int32).reshape(num_reqs, -1)
    table[:, 0] = own[:, 0]  # different first blocks, or requests would share gathered contexts
    table[:, -written:] = own[:, 1:][:, -table.shape[1] :]
    positions = np.arange(context - num_rows, context)
    slots = table[:, positions // block_size] * block_size + positions % block_size
    return StepLayout(
        np.arange(num_reqs + 1, dtype=np.int32) * num_rows,
        np.full(num_reqs, context, np.int32),
        table,
        slots.ravel().astype(np.int32),
        block_size,
    )
