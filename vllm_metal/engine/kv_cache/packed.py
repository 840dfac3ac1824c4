# SPDX-License-Identifier: Apache-2.0
"""K and V of layers with few heads, several of which share the heads of one storage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import mlx.core as mx

from metal_kernels.paged_attention.buckets import Indices
from vllm_metal.engine.kv_cache.kernels import KernelKVCache, KernelPlan
from vllm_metal.engine.kv_cache.layer_cache import KVArray, LayerKVCache
from vllm_metal.engine.kv_cache.layer_state import Pending, PlanT, Storage
from vllm_metal.engine.kv_cache.scatter import ScatterKVCache, ScatterPlan

# All layers of a pool whose blocks are of one size can then share memory, whatever their number of
# heads: layers with windows free blocks for those without, and for recurrent states.
#
# Only the storage holds its arrays: MLX copies an array when it writes into one of two that share
# memory. So each use makes the layer's views of the storage anew.


def heads_of(whole: Storage, first: int, count: int) -> LayerKVCache:
    """Returns a layer's K and V in `count` heads of a storage, from `first` on.

    The storage owns the memory, and its fences order the accesses of all layers in it.
    """
    if isinstance(whole, KernelKVCache):
        return KernelHeads(whole, first, count)
    return ScatterHeads(cast(ScatterKVCache, whole), first, count)


def _part(array: KVArray, heads: slice) -> KVArray:
    scales = None if array.scales is None else array.scales[heads]
    return KVArray(array.elements[heads], scales)


class _Heads(LayerKVCache[PlanT]):
    """Some heads of a storage, with any backend."""

    def __init__(self, whole: LayerKVCache[PlanT], first: int, count: int) -> None:
        self._whole, self.heads = whole, slice(first, first + count)
        self.backend, self.split, self.value_size = whole.backend, whole.split, whole.value_size
        self.dtype = self._input_dtype = whole.dtype

    @property
    def storage(self) -> Storage:
        return self._whole

    @property
    def page_arrays(self) -> list[mx.array]:
        # The first layer exports the whole storage, for all layers in it.
        return [] if self.heads.start else self._whole.arrays

    @property
    def keys(self) -> KVArray:  # type: ignore[override]
        return _part(self._whole.keys, self.heads)

    @property
    def values(self) -> KVArray | None:  # type: ignore[override]
        values = self._whole.values
        return None if values is None else _part(values, self.heads)

    @property
    def arrays(self) -> list[mx.array]:
        return self._whole.arrays

    @arrays.setter
    def arrays(self, arrays: Sequence[mx.array]) -> None:
        self._whole.arrays = arrays


class ScatterHeads(_Heads[ScatterPlan], ScatterKVCache):
    """Heads of a storage that MLX's operations read and write."""

    def _indices(self, plan: ScatterPlan) -> Indices:
        heads, *indices = plan.indices
        return heads + self.heads.start, *indices

    @property
    def inputs(self) -> list[mx.array]:
        """The deferred K and V; the storage lists its arrays."""
        return [array for each in self._pending for array in each.arrays]

    @contextmanager
    def traced(self, inputs: Sequence[mx.array]) -> Iterator[None]:
        pending, given = self._pending, iter(inputs)
        self._pending = tuple(
            Pending(each.plan, [next(given) for _ in each.arrays]) for each in pending
        )
        try:
            yield
        finally:
            self._pending = pending


class KernelHeads(_Heads[KernelPlan], KernelKVCache):
    """Heads of a storage that our kernels read and write in place."""

    _whole: KernelKVCache

    @property
    def _written_fence(self) -> mx.array | None:
        return self._whole._written_fence

    @_written_fence.setter
    def _written_fence(self, fence: mx.array | None) -> None:
        self._whole._written_fence = fence

    @property
    def _write_fences(self) -> Sequence[mx.array]:
        return self._whole._write_fences

    @_write_fences.setter
    def _write_fences(self, fences: Sequence[mx.array]) -> None:
        self._whole._write_fences = fences

    @property
    def _newest_plan(self) -> object:
        return self._whole._newest_plan

    @_newest_plan.setter
    def _newest_plan(self, plan: object) -> None:
        self._whole._newest_plan = plan

    @property
    def inputs(self) -> list[mx.array]:
        return []  # the storage has its own

    @contextmanager
    def traced(self, inputs: Sequence[mx.array]) -> Iterator[None]:
        yield

    @property
    def outputs(self) -> list[Pending[object]]:
        return []

    @outputs.setter
    def outputs(self, outputs: Sequence[Pending[object]]) -> None:
        assert not outputs
