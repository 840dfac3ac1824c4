# SPDX-License-Identifier: Apache-2.0
"""Inputs of short convolutions, kept in the pool per token, for MTP layers of Inkling.

A convolution of k taps is a function of the inputs at a token's last k positions. An MTP layer
computes its last rows again in the next step, once their tokens are known, so a state that advances
would have to go back. Inputs that lie in the pool like K and V are overwritten instead: rejected
drafts, prefix hits and preemption need nothing of their own. vLLM stores them the same way
(`InklingConvState`), as a layer with a window of k positions; whole contexts would take several
times the model's K/V.

Inputs are cut into parts of the size of the layer's K, so that all pages of the pool have one size:
a pool layer holds two parts, as its K and its V.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple, cast

import mlx.core as mx

from metal_kernels import paged_attention
from metal_kernels.selfcheck import Case
from vllm_metal.engine.attention.attention_layer import AttentionLayer, layout_of_long_contexts
from vllm_metal.engine.attention.paged_cache import PagedCache
from vllm_metal.engine.kv_cache import compressed_rows
from vllm_metal.engine.kv_cache.compressed_rows import CompressedPlan
from vllm_metal.engine.kv_cache.layer_cache import KVBackend, LayerKVCache, parts_of
from vllm_metal.engine.kv_cache.layer_state import LayerState, PlanT, StepLayout, StepScope, joined
from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer, StepBounds
from vllm_metal.patches.mlx_patches.families.inkling import ConvolvingCache
from vllm_metal.patches.mlx_patches.seam import Compression

#: Kernels that write and read the inputs; no attention kernel does.
_KERNELS = ("kv_write", "kv_gather", "kv_blocks")
_ANY = 1 << 30  # positions; no context has more


class ConvInputKind(NamedTuple):
    """Layer properties that a plan depends on."""

    taps: int
    num_heads: int
    head_size: int


@dataclass(frozen=True)
class ConvInputLayer(AttentionLayer):
    """Two parts of the inputs of a convolution with `window` taps."""

    @staticmethod
    def beside(layer: AttentionLayer, count: int, taps: int) -> list[ConvInputLayer]:
        """Returns `count` layers of the same place and the same K and V as a layer of attention."""
        heads, size = layer.num_kv_heads, layer.head_size
        return [
            ConvInputLayer(f"{layer.place}.{1 + index}", heads, heads, size, taps)
            for index in range(count)
        ]

    @cached_property
    def kind(self) -> Hashable:
        return ConvInputKind(self._taps, self.num_kv_heads, self.head_size)

    @property
    def _taps(self) -> int:
        assert self.window is not None
        return self.window

    def scope(self, state: LayerState) -> StepScope:
        assert isinstance(state, LayerKVCache)
        return StepScope(lambda layout: self._planned(layout.split(state.split), state.backend))

    def _planned(self, layout: StepLayout, backend: KVBackend[PlanT]) -> PlanT:
        # Pieces of requests share a call whatever their contexts' lengths: there are no entries.
        by = Compression(self._taps, self._taps, self.head_size, smallest=_ANY)
        return compressed_rows.plan_of_keys(layout, by, self.num_kv_heads, backend)

    def cache(self, state: LayerState, scope: StepScope) -> ConvInputCache:
        assert isinstance(state, LayerKVCache)
        return ConvInputCache(state, scope)

    def unsupported(self, dtype: mx.Dtype, block_size: int) -> str | None:
        size = block_size // parts_of(block_size)
        reason = paged_attention.unsupported(self.shape, dtype, size)
        return reason and f"inputs of convolutions: {reason}"

    def cases(
        self,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        block_size: int,
        host: StatefulLayer | None = None,
    ) -> list[Case]:
        size = block_size // parts_of(block_size)
        return [Case(self.shape, dtype, elements, size, kernels=_KERNELS)]

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
        yield self.kind, partial(self._convolve_once, size, dtype, elements, backend)

    def _convolve_once(
        self, block_size: int, dtype: mx.Dtype, elements: mx.Dtype, backend: KVBackend
    ) -> mx.array:
        """Writes zeros for two tokens and reads what their convolutions read."""
        layout = layout_of_long_contexts(1, 2, block_size, block_size)
        num_blocks = int(layout.block_tables_np.max()) + 1
        kv_cache = self.allocate(num_blocks, block_size, elements, backend)
        scope, plan = self.scope(kv_cache), self._planned(layout.split(kv_cache.split), backend)
        with scope.during(mx.zeros(2, mx.int32), plan):
            rows = Convolutions([[self.cache(kv_cache, scope)]])
            inputs = mx.zeros((2, 2 * self.num_kv_heads * self.head_size), dtype)
            return rows.convolve(inputs, lambda rows: rows[:, self._taps - 1 :])

    def gathers(self, backend: KVBackend) -> bool:
        return False

    def profile(
        self,
        context: int,
        bounds: StepBounds,
        dtype: mx.Dtype,
        elements: mx.Dtype,
        backend: KVBackend,
    ) -> None:
        return  # a step reads no more for long contexts


class ConvInputCache(PagedCache[PlanT]):
    """The cache of one such layer."""

    def exchange(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """Writes the step's two parts, each [T, part], and reads those of each call of the plan.

        Returns:
            [n, Q + taps - 1, 2 * part] for each call: the inputs at the positions of a piece's Q
            tokens and before them, zeros before a text.
        """
        kv_cache, plan = self._kv_cache, self._scope.plan
        heads, _, _, size = kv_cache.keys.elements.shape
        kv_cache.write(plan, *(part.reshape(-1, heads, size) for part in (keys, values)))
        found = []
        for call in _reads_of(plan).calls:
            num_pieces, count = call.read_slots.shape
            slots = mx.broadcast_to(call.read_slots[:, None], (num_pieces, heads, count))
            parts = kv_cache.rows_at(plan, slots)
            found.append(
                mx.concatenate([part.swapaxes(1, 2).flatten(2) for part in parts], axis=-1)
            )
        return found

    @property
    def width(self) -> int:
        """Elements of both parts."""
        heads, _, _, size = self._kv_cache.keys.elements.shape
        return 2 * heads * size

    @property
    def plan(self) -> object:
        """The current step's plan; see StepScope."""
        return self._scope.plan


class Convolutions(ConvolvingCache):
    """The convolutions of one call of a layer, in their order, each over caches of its own."""

    def __init__(self, caches: Sequence[Sequence[ConvInputCache]]) -> None:
        self._caches = iter(caches)

    def convolve(self, inputs: mx.array, apply: Callable[[mx.array], mx.array]) -> mx.array:
        caches = next(self._caches)
        size, channels = caches[0].width // 2, inputs.shape[-1]
        padded = mx.pad(inputs, [(0, 0), (0, 2 * size * len(caches) - channels)])
        parts = mx.split(padded, 2 * len(caches), axis=-1)
        read = [
            cache.exchange(*parts[2 * index : 2 * index + 2]) for index, cache in enumerate(caches)
        ]
        outputs = [
            apply(mx.concatenate([*of_call], axis=-1)[..., :channels]).flatten(0, 1)
            for of_call in zip(*read, strict=True)
        ]
        out, order = joined(outputs), _reads_of(caches[0].plan).order
        return out if order is None else out[order]


def _reads_of(plan: object) -> compressed_rows.CompressedRows:
    found = cast(CompressedPlan, plan).compressed
    assert found is not None
    return found
