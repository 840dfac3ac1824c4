# SPDX-License-Identifier: Apache-2.0
"""The cache that an attention layer of mlx-lm sees, answered from the paged pool."""

from __future__ import annotations

from types import MethodType
from typing import Any, Generic, cast

import mlx.core as mx

from vllm_metal.attention import latent_heads
from vllm_metal.attention.latent_heads import Projections
from vllm_metal.kv_cache.latent_prompts import LatentPrompts, PlanWithPrompts
from vllm_metal.kv_cache.layer_cache import LayerKVCache
from vllm_metal.kv_cache.layer_state import PlanT, StepScope, joined
from vllm_metal.mlx_patches import multi_linear
from vllm_metal.mlx_patches.module_calls import CallingCache
from vllm_metal.mlx_patches.seam import AttendingCache, Scoring


class PagedCache(AttendingCache, Generic[PlanT]):
    """Stands where mlx-lm expects one layer's KV cache.

    The model feeds T rows of length 1; `offset` gives each its own position, `update_and_fetch`
    hands K/V to the pool and `attend` is called by the seam in place of dense attention.
    """

    def __init__(self, kv_cache: LayerKVCache[PlanT], scope: StepScope[PlanT]) -> None:
        """
        Args:
            kv_cache: the layer's K and V.
            scope: the step at hand; outside one, every call raises RuntimeError.
        """
        self._kv_cache = kv_cache
        self._scope = scope

    @property
    def offset(self) -> mx.array:
        """[T] int32, position of each row: mlx-lm rotates each by its own."""
        return self._scope.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes this step's K/V, each [T, Hkv, 1, D], and returns them: `attend` needs neither."""
        self._kv_cache.write(self._scope.plan, keys[:, :, 0], values[:, :, 0])
        return keys, values

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scoring: Scoring
    ) -> mx.array:
        """[T, H, 1, D] queries over the request's whole context; [T, H, 1, DV] back."""
        return self._kv_cache.attend(self._scope.plan, queries[:, :, 0], scoring)[:, :, None]


class SharedCache(PagedCache[PlanT]):
    """The cache of a layer whose K/V other layers read, which keep none themselves.

    Gemma 3n hands such a layer this cache, Gemma 4 what `update_and_fetch` returned.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Takes this step's K/V, each [T, Hkv, 1, D], and returns itself: the seam asks it."""
        super().update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """What stands for K and V of the whole context."""
        return self, self


class LatentCache(PagedCache[PlanT], CallingCache):
    """The cache of a layer of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Of a token such a layer keeps one row: a latent, which every head's K and V are made of, and the
    rotated part of the keys, which all heads have in common. A row of length 1 attends to latents
    themselves (the paper's "absorbed" form): the queries are brought into the latents' space, and
    the values come out in it.

    mlx-lm's modules compute the scores of positions apart, as (q_pe * scale) @ k_pe^T, and hand
    them to attention as a mask. They get the identity as `k_pe` here, so that attention gets
    q_pe * scale itself, and can multiply it with the rows of the pool.

    Prompts for which that is less work (`latent_prompts`) attend by keys and values of heads. Then
    the module's projections are left out of its call, and applied here: to the queries of the other
    rows, and to the latents of the prompts' contexts.
    """

    _projections: Projections  # of the module whose call is under way

    def call(self, module: MethodType, args: tuple[Any, ...], kwargs: Any) -> Any:
        """See CallingCache."""
        if self._prompts is None:
            return module(*args, **kwargs)
        owner: Any = module.__self__
        self._projections = Projections(owner.embed_q, owner.unembed_out)
        with multi_linear.left_out():
            return module(*args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes this step's latents and rotated keys.

        Args:
            keys: [T, 1, 1, rank] latents.
            values: [T, 1, 1, n] rotated keys.

        Returns:
            The latents, and the identity, [1, 1, n, n].
        """
        rows = mx.concatenate([keys, values], axis=-1)[:, :, 0]
        self._kv_cache.write(self._scope.plan, rows, rows)
        return keys, mx.eye(values.shape[-1], dtype=values.dtype)[None, None]

    def attend_latent(
        self, queries: mx.array, values: mx.array, position_queries: mx.array, scale: float
    ) -> mx.array | None:
        """See AttendingCache."""
        # The scale applies to the whole product, so it leaves the queries of positions again.
        rotated = (position_queries.astype(mx.float32) / scale).astype(queries.dtype)
        rows = mx.concatenate([queries, rotated], axis=-1)
        if self._prompts is None:
            return self.attend(rows, rows, rows, Scoring(scale))
        key_size = queries.shape[-1]
        return self._attend_apart(self._prompts, rows[:, :, 0], key_size, scale)[:, :, None]

    @property
    def _prompts(self) -> LatentPrompts | None:
        return cast(PlanWithPrompts, self._scope.plan).prompts

    def _attend_apart(
        self, plan: LatentPrompts, queries: mx.array, key_size: int, scale: float
    ) -> mx.array:
        """[T, H, value] of [T, H, key + rotated] queries that no projection was applied to."""
        outputs = []
        if plan.others is not None:
            keys, rotated = mx.split(queries[plan.others].swapaxes(0, 1), [key_size], axis=-1)
            rows = mx.concatenate([self._projections.embed(keys), rotated], axis=-1)
            out = self._kv_cache.attend(self._scope.plan, rows.swapaxes(0, 1), Scoring(scale))
            outputs.append(self._projections.unembed(out.swapaxes(0, 1)).swapaxes(0, 1))
        contexts = self._kv_cache.contexts(self._scope.plan, plan)
        for prompt, context in zip(plan.prompts, contexts, strict=True):
            rows = queries[prompt.first : prompt.first + prompt.num_rows]
            context = context.astype(queries.dtype)
            outputs.append(latent_heads.attend(rows, context, self._projections, scale, plan.pace))
        out = joined(outputs)
        return out if plan.order is None else out[plan.order]
