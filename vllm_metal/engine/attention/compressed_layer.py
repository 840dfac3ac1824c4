# SPDX-License-Identifier: Apache-2.0
"""Layers of DeepSeek V4 and V4.1: keys of a window, rows of open groups, and compressed entries.

Each is a layer of its own in the pool, as the caches of one layer of the model. All store rows in
units of one size, as heads, so that layers of a window free blocks for the entries of whole
contexts (`specs.kv_cache_specs`). Rows of a group that is still open lie in the pool like keys, so
hits, rejected drafts, preemption, disk and peers need nothing of their own: a step computes the
entries of all groups that it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import mlx.core as mx

from metal_kernels import paged_attention
from metal_kernels.paged_attention import AttentionShape
from metal_kernels.paged_attention.buckets import MAX_GATHERED
from metal_kernels.selfcheck import Case
from vllm_metal.engine.attention import compressed
from vllm_metal.engine.attention.attention_layer import AttentionLayer, layout_of_long_contexts
from vllm_metal.engine.attention.compressed import Chosen, Stored, in_units
from vllm_metal.engine.attention.paged_cache import PagedCache
from vllm_metal.engine.kv_cache import compressed_rows
from vllm_metal.engine.kv_cache.layer_cache import KVBackend, LayerKVCache, parts_of
from vllm_metal.engine.kv_cache.layer_state import LayerState, PlanT, StepLayout, StepScope
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer, StepBounds
from vllm_metal.patches.mlx_patches.seam import AttendingCache, Compression, Scoring

#: Kernels that write and read the rows; no attention kernel does.
_KERNELS = ("kv_write", "kv_gather", "kv_blocks")
#: "index": an indexer's entries, by which it chooses among others.
Role = Literal["keys", "groups", "entries", "index"]
_OF_ENTRIES = ("entries", "index")
_NONE = Compression(1, 1, 1)


@dataclass(frozen=True)
class RowLayer(AttentionLayer):
    """Rows of one kind; `num_kv_heads` units of `head_size` elements per position."""

    role: Role = "keys"
    by: Compression = _NONE
    width: int = 1  # elements of a row
    query_heads: int = 1  # of those who attend to the rows, or choose from them
    query_dtype: mx.Dtype | None = None  # in which attention computes; None: the model's

    @staticmethod
    def of(
        name: str,
        role: Role,
        by: Compression,
        width: int,
        query_heads: int = 1,
        query_dtype: mx.Dtype | None = None,
    ) -> RowLayer:
        units = by.units_of(width)
        of_groups = role in _OF_ENTRIES
        if of_groups and by.size % by.slots_of(width):
            raise NotImplementedError(
                f"has entries of {width} elements for {by.size} positions in {name}, which is not "
                f"supported: they do not fit into {by.unit} elements per position"
            )
        heads, kept = (1, None) if of_groups else (units, by.kept)
        sizes = heads, heads, by.unit, kept
        return RowLayer(
            *(name, *sizes),
            latent=True,
            role=role,
            by=by,
            width=width,
            query_heads=query_heads,
            query_dtype=query_dtype,
        )

    @cached_property
    def kind(self) -> Hashable:
        by: Hashable = self.by
        if self.role == "keys":  # whatever the entries beside them
            by = self.by.window, self.by.unit, self.by.smallest
        return self.role, by, self.width, self.query_heads, self.query_dtype

    def scope(self, state: LayerState) -> StepScope:
        assert isinstance(state, LayerKVCache)
        return StepScope(lambda layout: self._planned(layout.split(state.split), state.backend))

    def _planned(self, layout: StepLayout, backend: KVBackend[PlanT]) -> PlanT:
        if self.role == "keys":
            return compressed_rows.plan_of_keys(layout, self.by, self.num_kv_heads, backend)
        if self.role == "groups":
            return compressed_rows.plan_of_groups(layout, self.by, self.num_kv_heads, backend)
        return compressed_rows.plan_of_entries(
            layout, self.by, self.by.slots_of(self.width), backend
        )

    def cache(self, state: LayerState, scope: StepScope) -> RowCache:
        assert isinstance(state, LayerKVCache)
        return RowCache(state, scope)

    @property
    def _pair(self) -> AttentionShape:
        """One head of a unit's size, as the kernels know it."""
        return AttentionShape(1, 1, self.head_size, self.head_size)

    def unsupported(self, dtype: mx.Dtype, block_size: int) -> str | None:
        size = block_size // parts_of(block_size)
        reason = paged_attention.unsupported(self._pair, dtype, size)
        return reason and f"rows of compressed attention: {reason}"

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
        yield self.kind, partial(self._read_once, layout, dtype, elements, backend)

    def _read_once(
        self, layout: StepLayout, dtype: mx.Dtype, elements: mx.Dtype, backend: KVBackend[PlanT]
    ) -> mx.array:
        """Writes zeros for all tokens, and reads what the layout's tokens read."""
        stored = self._filled(layout, dtype, elements, backend)
        if self.role == "groups":
            assert stored.reads.groups is not None
            return stored.rows_at(stored.reads.groups)
        return mx.concatenate(
            [stored.rows_at(call.read_slots).flatten() for call in stored.reads.calls]
        )

    def _filled(
        self, layout: StepLayout, dtype: mx.Dtype, elements: mx.Dtype, backend: KVBackend[PlanT]
    ) -> Stored:
        num_blocks = int(layout.block_tables_np.max()) + 1
        kv_cache: LayerKVCache = self.allocate(num_blocks, layout.block_size, elements, backend)
        plan = self._planned(layout.split(kv_cache.split), backend)
        num_rows = int(layout.query_start_loc_np[-1])
        if self.role in _OF_ENTRIES:
            num_rows = -(-num_rows // self.by.size) * self.by.slots_of(self.width)
        rows = mx.zeros((num_rows, self.num_kv_heads, self.head_size), dtype)
        kv_cache.write(plan, rows, rows)
        return Stored(kv_cache, plan, self.width)

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
        """Runs a prompt's largest calls over one long context, and many decodes.

        Without kernels, which `fit` cannot launch.
        """
        rows = min(bounds.num_tokens, context, compressed_rows.MAX_TOKENS)
        many = min(bounds.max_num_seqs, max(MAX_GATHERED // context, 1))
        for num_reqs, num_rows in ((1, rows), (many, 1)):
            layout = layout_of_long_contexts(num_reqs, num_rows, context, bounds.block_size)
            if self.role == "groups":
                mx.eval(self._read_once(layout, dtype, elements, SCATTER))
                continue
            tokens = num_reqs * num_rows
            positions = mx.full(tokens, context - 1, mx.int32)
            queries = mx.zeros((tokens, self.query_heads, self.width), self.query_dtype or dtype)
            stored = self._filled(layout, dtype, elements, SCATTER)
            if self.role == "index":
                weights = mx.zeros(queries.shape[:2])
                given = stored, queries, weights, positions, self.by
                found = compressed.choose(*given)
                if self.by.blocks is not None:  # later layers choose among these blocks
                    mx.eval(_arrays(found))
                    found = compressed.choose(*given, found)
                mx.eval(_arrays(found))
                continue
            keys, entries = stored, None
            if self.role == "entries":
                layer = RowLayer.of(self.name, "keys", self.by, self.width)
                keys, entries = layer._filled(layout, dtype, elements, SCATTER), stored
            scoring = Scoring(1.0, mx.zeros(self.query_heads))
            attending = queries, positions, self.by, scoring, entries, self._chosen(entries)
            mx.eval(compressed.attend(keys, *attending))

    def _chosen(self, entries: Stored | None) -> Chosen | None:
        """Returns the first entry as often as a token chooses one."""
        if entries is None or self.by.topk is None:
            return None
        topk, slots = self.by.topk, self.by.slots_of(self.width)
        return Chosen(
            [
                mx.zeros((call.num_pieces, call.num_tokens, topk), mx.int32)
                if call.read_slots.shape[1] // slots > topk
                else None
                for call in entries.reads.calls
            ]
        )


def _arrays(chosen: Chosen) -> list[mx.array]:
    return [each for each in (*chosen.numbers, *chosen.blocks) if each is not None]


class RowCache(PagedCache[PlanT]):
    """The cache of any of these layers."""

    _width = 0  # of the rows last written

    def _write(self, rows: mx.array) -> None:
        """Writes [N, D] rows."""
        kv_cache, (heads, _, _, unit) = self._kv_cache, self._kv_cache.keys.elements.shape
        parts = in_units(rows, heads, unit)
        kv_cache.write(self._scope.plan, parts, parts)
        self._width = rows.shape[-1]

    @property
    def stored(self) -> Stored:
        return Stored(self._kv_cache, self._scope.plan, self._width)

    def write_groups(self, rows: mx.array, by: Compression) -> tuple[mx.array, mx.array]:
        """See AttendingCache."""
        self._write(rows[:, 0, 0])
        reads = self.stored.reads
        assert reads.groups is not None and reads.firsts is not None
        return self.stored.rows_at(reads.groups).astype(rows.dtype), reads.firsts

    def write_entries(self, entries: mx.array, by: Compression) -> None:
        """See AttendingCache."""
        slots = by.slots_of(entries.shape[-1])
        missing = slots * by.unit - entries.shape[-1]
        self._write(mx.pad(entries, [(0, 0), (0, missing)]).reshape(-1, by.unit))
        self._width = entries.shape[-1]

    def choose_entries(
        self,
        entries: mx.array | None,
        queries: mx.array,
        weights: mx.array,
        by: Compression,
        among: Chosen | None = None,
    ) -> Chosen:
        """See AttendingCache."""
        if entries is not None:
            self.write_entries(entries, by)
        scored = queries[:, :, 0], weights[:, 0], self._scope.positions
        return compressed.choose(self.stored, *scored, by, among)

    def attend_to_entries(
        self,
        queries: mx.array,
        keys: mx.array,
        by: Compression,
        scoring: Scoring,
        entries: AttendingCache | None = None,
        chosen: Chosen | None = None,
    ) -> mx.array:
        """See AttendingCache."""
        self._write(keys[:, 0, 0])
        assert entries is None or isinstance(entries, RowCache)
        stored = None if entries is None else entries.stored
        given = queries[:, :, 0], self._scope.positions, by, scoring, stored, chosen
        return compressed.attend(self.stored, *given)[:, :, None]


class RowProbe(AttendingCache):
    """Records what a layer writes to one of these caches; see `layers.Probe`."""

    def __init__(self) -> None:
        self._found: tuple[Role, Compression, int] | None = None
        self._queries: tuple[int, mx.Dtype | None] = 1, None  # heads, and dtype if it is another

    @property
    def offset(self) -> mx.array:
        return mx.zeros(1, mx.int32)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        raise NotImplementedError("the model writes K and V to a cache of compressed attention")

    def attend(self, *args: object) -> mx.array:
        raise NotImplementedError("the model attends to K and V of compressed attention")

    def write_groups(self, rows: mx.array, by: Compression) -> tuple[mx.array, mx.array]:
        self._found = "groups", by, rows.shape[-1]
        count = 2 * by.size if by.overlap else by.size
        return mx.zeros((1, count, rows.shape[-1]), rows.dtype), mx.zeros(1, mx.int32)

    def write_entries(self, entries: mx.array, by: Compression) -> None:
        self._found = "entries", by, entries.shape[-1]

    def choose_entries(
        self,
        entries: mx.array | None,
        queries: mx.array,
        weights: mx.array,
        by: Compression,
        among: Any = None,
    ) -> Chosen:
        if entries is not None:
            self._found = "index", by, entries.shape[-1]
            self._queries = queries.shape[1], None
        return Chosen(())

    def attend_to_entries(
        self,
        queries: mx.array,
        keys: mx.array,
        by: Compression,
        scoring: Scoring,
        entries: AttendingCache | None = None,
        chosen: Any = None,
    ) -> mx.array:
        self._found = "keys", by, keys.shape[-1]
        self._queries = queries.shape[1], None if queries.dtype == keys.dtype else queries.dtype
        if isinstance(entries, RowProbe):
            entries._queries = self._queries
        return mx.zeros_like(queries)

    def layer(self, name: str) -> RowLayer:
        if self._found is None:
            raise NotImplementedError(
                f"does not write to the cache {name}, which is not supported with compressed "
                "attention"
            )
        return RowLayer.of(name, *self._found, *self._queries)
