# SPDX-License-Identifier: Apache-2.0
"""An indexer's keys, by which the attention of its layer chooses positions; see sparse.py.

The keys are a layer of their own beside that of the K/V or latents: K without V in the same blocks,
so the prefix cache, preemption, disk and peers treat them like any other layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np

from metal_kernels import paged_attention
from metal_kernels.paged_attention import AttentionShape
from metal_kernels.paged_attention.buckets import MAX_GATHERED
from metal_kernels.selfcheck import Case
from vllm_metal.engine.attention import sparse
from vllm_metal.engine.attention.attention_layer import AttentionLayer, layout_of_long_contexts
from vllm_metal.engine.attention.paged_cache import PagedCache
from vllm_metal.engine.kv_cache import sparse_tokens
from vllm_metal.engine.kv_cache.layer_cache import KVBackend, LayerKVCache, parts_of
from vllm_metal.engine.kv_cache.layer_state import LayerState, PlanT, StepLayout, StepScope
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.sparse_tokens import SparsePlan
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer, StepBounds
from vllm_metal.patches.mlx_patches.seam import (
    BlockChoice,
    Choice,
    GroupChoice,
    num_positions,
)

#: Kernels that write and read the keys; no attention kernel does.
_KERNELS = ("kv_write", "kv_gather", "kv_blocks")


class IndexKind(NamedTuple):
    """Layer properties that a plan depends on."""

    num_heads: int
    head_size: int
    choice: Choice


@dataclass(frozen=True)
class IndexLayer(AttentionLayer):
    """Keys of a layer's indexer, or rows that it pools to keys; `num_heads`: its query heads."""

    choice: Choice = 0
    query_size: int = 0

    @staticmethod
    def of(
        name: str, num_heads: int, row_size: int, choice: Choice, query_size: int | None = None
    ) -> IndexLayer:
        """`query_size` differs from `row_size` if the rows are pooled."""
        query_size = query_size or row_size
        if isinstance(choice, GroupChoice):  # a layer keeps no weights
            choice = replace(choice, pooled=_Pooling(query_size))
        # Auxiliary, so that beside states its pages are no larger than its rows.
        return IndexLayer(
            *(name, num_heads, 1, row_size, None),
            latent=True,
            is_auxiliary=True,
            topk=num_positions(choice),
            choice=choice,
            query_size=query_size,
        )

    @cached_property
    def kind(self) -> Hashable:
        return IndexKind(self.num_heads, self.head_size, self.choice)

    @property
    def _topk(self) -> int:
        assert self.topk is not None
        return self.topk

    @property
    def _per_key(self) -> int:
        """Positions that one key stands for."""
        return self.choice.size if isinstance(self.choice, GroupChoice) else 1

    @property
    def _pair(self) -> AttentionShape:
        """One head of the keys' size, as the kernels know it."""
        return AttentionShape(1, 1, self.head_size, self.head_size)

    def scope(self, state: LayerState) -> StepScope:
        assert isinstance(state, LayerKVCache)
        return StepScope(
            lambda layout: self._planned(layout.split(state.split), state.backend, self._topk)
        )

    def _planned(self, layout: StepLayout, backend: KVBackend[PlanT], topk: int) -> PlanT:
        plan_of = partial(backend.plan_of_writes, num_kv_heads=self.num_kv_heads)
        work = 2 * self.num_heads * self.query_size // self._per_key
        return cast(
            PlanT,
            sparse_tokens.with_contexts(layout, topk, plan_of, backend.plan_of_contexts, work),
        )

    def cache(self, state: LayerState, scope: StepScope) -> IndexCache:
        assert isinstance(state, LayerKVCache)
        return IndexCache(state, scope)

    def unsupported(self, dtype: mx.Dtype, block_size: int) -> str | None:
        size = block_size // parts_of(block_size)
        reason = paged_attention.unsupported(self._pair, dtype, size)
        return reason and f"the indexer's keys: {reason}"

    def cases(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        host: StatefulLayer | None = None,
    ) -> list[Case]:
        size = block_size // parts_of(block_size)
        return [Case(self._pair, dtype, elements, size, kernels=_KERNELS)]

    def trials(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        backend: KVBackend,
        host: StatefulLayer | None = None,
    ) -> Iterator[tuple[Hashable, Callable[[], mx.array]]]:
        if backend.defers_writes:  # no kernels
            return
        size = block_size // parts_of(block_size)
        layout = layout_of_long_contexts(1, 2, size, size)
        yield (
            self.kind,
            partial(self._choose_once, layout, _least(self.choice), dtype, elements, backend),
        )

    def _choose_once(
        self,
        layout: StepLayout,
        choice: Choice,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        backend: KVBackend[PlanT],
    ) -> mx.array:
        """Writes zeros for all tokens, and chooses positions for each."""
        num_blocks = int(layout.block_tables_np.max()) + 1
        kv_cache = self.allocate(num_blocks, layout.block_size, elements, backend)
        layout = layout.split(kv_cache.split)
        plan = self._planned(layout, backend, num_positions(choice))
        num_tokens = int(layout.query_start_loc_np[-1])
        self._write_once(kv_cache, plan, num_tokens, dtype)
        tokens = cast(SparsePlan, plan).sparse
        assert tokens is not None
        starts, ends = layout.query_start_loc_np, layout.seq_lens_np
        rows = np.arange(num_tokens) + np.repeat(ends - starts[1:], np.diff(starts))
        queries = mx.zeros((num_tokens, self.num_heads, self.query_size), dtype)
        weights = None if isinstance(choice, BlockChoice) else mx.zeros(queries.shape[:2])
        positions = mx.array(rows.astype(np.int32))
        return sparse.choose(kv_cache, plan, tokens, queries, weights, positions, choice)

    def gathers(self, backend: KVBackend) -> bool:
        return True

    def profile(
        self,
        context: int,
        bounds: StepBounds,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        backend: KVBackend,
    ) -> None:
        """Runs scores of a prompt over one long context, and of many decodes."""
        if context <= self._topk:
            return
        # One of three calls waits for another.
        rows = 3 * max(sparse.MAX_SCORES * self._per_key // (context * self.num_heads), 1)
        many = max(MAX_GATHERED // context, 1)
        for num_reqs, num_rows in (
            (1, min(bounds.num_tokens, context - self._topk, rows)),
            (min(bounds.max_num_seqs, many), 1),
        ):
            layout = layout_of_long_contexts(num_reqs, num_rows, context, bounds.block_size)
            # Without kernels, which `fit` cannot launch.
            mx.eval(self._choose_once(layout, self.choice, dtype, elements, SCATTER))


@dataclass(frozen=True)
class _Pooling:
    """Pools rows without a model's weights, in memory as a model does."""

    size: int  # of a key

    def __call__(self, rows: mx.array) -> mx.array:
        return (mx.softmax(rows, axis=2) * rows).sum(axis=2)[..., : self.size]


def _least(choice: Choice) -> Choice:
    """Returns a choice of the same kind that one position suffices for."""
    if isinstance(choice, GroupChoice):
        return replace(choice, size=1, topk=1)
    return 1 if isinstance(choice, int) else BlockChoice(1, 1, 0)


class IndexCache(PagedCache[PlanT]):
    """The cache of an indexer: takes its keys, and chooses positions for its layer's attention."""

    def choose(
        self, keys: mx.array, queries: mx.array, weights: mx.array | None, choice: Choice
    ) -> mx.array | None:
        """See AttendingCache. Returns [t, C, topk] positions for the plan's sparse tokens."""
        plan, rows = self._scope.plan, keys[:, :, 0]
        self._kv_cache.write(plan, rows, rows)
        tokens = cast(SparsePlan, plan).sparse
        if tokens is None:
            return None
        if weights is not None:
            weights = weights[:, 0].astype(mx.float32)
        scored = queries[:, :, 0], weights, self._scope.positions
        return sparse.choose(self._kv_cache, plan, tokens, *scored, choice)
