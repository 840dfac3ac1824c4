# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's KV cache interface for attention layers, backed by the paged pool."""

from __future__ import annotations

from functools import cache, partial
from types import MethodType
from typing import Any, Generic, NamedTuple, cast

import mlx.core as mx

from metal_kernels.kv_write import RotationKind
from vllm_metal.engine.attention import bidirectional, latent_heads
from vllm_metal.engine.attention.latent_heads import Projections
from vllm_metal.engine.attention.sparse import attend as attend_to_chosen
from vllm_metal.engine.kv_cache.layer_cache import LayerKVCache
from vllm_metal.engine.kv_cache.layer_state import PlanT, StepScope, joined
from vllm_metal.engine.kv_cache.separate_prompts import PlanWithPrompts, SeparatePrompts
from vllm_metal.engine.kv_cache.sparse_tokens import SparsePlan
from vllm_metal.patches.mlx_patches import multi_linear, rotations
from vllm_metal.patches.mlx_patches.module_calls import CallingCache
from vllm_metal.patches.mlx_patches.rotations import OfLayer
from vllm_metal.patches.mlx_patches.seam import AttendingCache, Scoring


class LayerRotation(NamedTuple):
    """RoPE that a layer applies to its keys right before it passes them to its cache."""

    kind: RotationKind
    queries: bool  # whether queries get the same rotation right before attention


class PagedCache(AttendingCache, Generic[PlanT]):
    """Replaces mlx-lm's KV cache of one layer.

    The model gets a batch of T tokens of length 1. `offset` gives each its position,
    `update_and_fetch` writes K/V to the pool, and the patched attention calls `attend`.

    If the layer has just applied RoPE to its keys, the pool's write takes the unrotated keys and
    applies RoPE itself, also to the layer's queries: see mlx_patches.rotations.
    """

    def __init__(
        self,
        kv_cache: LayerKVCache[PlanT],
        scope: StepScope[PlanT],
        rotation: LayerRotation | None = None,
    ) -> None:
        """
        Args:
            kv_cache: the layer's K and V.
            scope: the current step; outside of one, every call raises RuntimeError.
            rotation: RoPE that the write can apply; None: the layer applies it itself.
        """
        self._kv_cache = kv_cache
        self._scope = scope
        self._rotation = rotation if kv_cache.rotates else None
        #: Queries rotated by the layer, and the same queries rotated by the write.
        self._rotated_queries: tuple[mx.array, mx.array] | None = None

    @property
    def offset(self) -> mx.array:
        """[T] int32, each token's position, by which mlx-lm applies RoPE."""
        return self._scope.positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes this step's K and V, each [T, Hkv, 1, D], and returns them unchanged."""
        of = self._rotated(keys)
        if of is None:
            self._kv_cache.write(self._scope.plan, keys[:, :, 0], values[:, :, 0])
            return keys, values
        queries = None if of.queries is None else of.queries.source[:, :, 0]
        rotated = self._kv_cache.rotate_and_write(
            self._scope.plan,
            of.keys.source[:, :, 0],
            values[:, :, 0],
            self._scope.padded_positions,
            of.keys.rotation,
            queries,
        )
        if of.queries is not None and rotated is not None:
            self._rotated_queries = of.queries.result, rotated[:, :, None]
        return keys, values

    def _rotated(self, keys: mx.array) -> OfLayer | None:
        """Returns the inputs of the layer's rotation; None: write the keys as they are."""
        self._rotated_queries = None
        if self._rotation is None:
            return None
        of = rotations.of_keys(self._scope.positions, keys)
        if of is None or of.keys.rotation.kind != self._rotation.kind:
            return None
        return of if self._rotation.queries else of._replace(queries=None)

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scoring: Scoring
    ) -> mx.array:
        """Attends with [T, H, 1, D] queries to each request's context; returns [T, H, 1, DV]."""
        plan, rows = self._scope.plan, self._rows_of(queries)
        if (separate := cast(PlanWithPrompts, plan).prompts) is not None:
            return bidirectional.attend(self._kv_cache, plan, separate, rows, scoring)[:, :, None]
        return self._kv_cache.attend(plan, rows, scoring)[:, :, None]

    def attend_to_blocks(
        self, queries: mx.array, scale: float, chosen: mx.array | None
    ) -> mx.array:
        """See AttendingCache. `chosen`: [t, C, topk] positions of the plan's sparse tokens."""
        plan, rows = self._scope.plan, self._rows_of(queries)
        scoring = Scoring(scale)
        attend = partial(self._kv_cache.attend, plan, scoring=scoring)
        if (sparse := cast(SparsePlan, plan).sparse) is None:
            return attend(rows)[:, :, None]
        assert chosen is not None
        outputs = [] if sparse.others is None else [attend(rows[sparse.others])]
        some = sparse.of_all(rows)
        read_slots = sparse.read_slots_of(chosen)
        outputs.append(
            attend_to_chosen(self._kv_cache, plan, some, read_slots, scoring, sparse.pace)
        )
        return sparse.in_order(outputs)[:, :, None]

    def _rows_of(self, queries: mx.array) -> mx.array:
        """Rotates the layer's [T, H, 1, D] queries, and returns them as [T, H, D]."""
        rotated, self._rotated_queries = self._rotated_queries, None
        if rotated is not None and queries is rotated[0]:
            queries = rotated[1]
        return queries[:, :, 0]


class SharedCache(PagedCache[PlanT]):
    """The cache of a layer whose K/V are shared with later layers that have none of their own.

    Gemma 3n passes this cache to those layers, Gemma 4 the results of `update_and_fetch`.
    """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Writes this step's K and V, each [T, Hkv, 1, D], and returns placeholders for them."""
        super().update_and_fetch(keys, values)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Any, Any]:
        """Returns placeholders for K and V, by which attention finds this cache."""
        return self, self


class LatentCache(PagedCache[PlanT], CallingCache):
    """The cache of a layer of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    Per token such a layer stores a latent, from which every head's K and V are projected, and the
    rotated part of the keys, which all heads share. Tokens attend to latents directly (the paper's
    "absorbed" form): queries are projected to latent space, and the outputs are in it.

    mlx-lm's modules compute the position scores separately, as (q_pe * scale) @ k_pe^T, and pass
    them to attention as a mask. Here they get the identity as `k_pe`, so attention receives
    q_pe * scale and multiplies it with the rotated keys in the pool.

    Long prompts (`latent_prompts`) attend with expanded K and V, which is less work. The module's
    projections are then skipped in its call and applied here: to the queries of other tokens, and
    to the latents of the prompts' contexts.
    """

    _projections: Projections  # of the module that is being called

    def call(self, module: MethodType, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Calls the layer's module, without its MLA projections if long prompts apply them here."""
        if self._prompts is None:
            return module(*args, **kwargs)
        owner: Any = module.__self__
        self._projections = Projections(owner.embed_q, owner.unembed_out)
        with multi_linear.left_out():
            return module(*args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Writes this step's latents and rotated keys.

        Args:
            keys: [T, 1, 1, rank] latents.
            values: [T, 1, 1, n] rotated keys.

        Returns:
            The latents, and the identity, [1, 1, n, n].
        """
        of = self._rotated(values)
        if of is None:
            rows = mx.concatenate([keys, values], axis=-1)[:, :, 0]
            self._kv_cache.write(self._scope.plan, rows, rows)
        else:
            parts = keys[:, :, 0], of.keys.source[:, :, 0]
            placed = self._scope.padded_positions, of.keys.rotation
            self._kv_cache.rotate_and_write(self._scope.plan, *parts, *placed)
        return keys, _identity(values.shape[-1], values.dtype)

    def attend_latent(
        self, queries: mx.array, values: mx.array, position_queries: mx.array, scale: float
    ) -> mx.array | None:
        """Attends with queries in latent space and rotated queries; see AttendingCache."""
        # The scale is applied to the whole product later, so it is divided out here.
        rotated = (position_queries.astype(mx.float32) / scale).astype(queries.dtype)
        rows = mx.concatenate([queries, rotated], axis=-1)
        if self._prompts is None:
            return self.attend(rows, rows, rows, Scoring(scale))
        key_size, scoring = queries.shape[-1], Scoring(scale)
        return self._attend_separately(self._prompts, rows[:, :, 0], key_size, scoring)[:, :, None]

    def attend_chosen(
        self,
        queries: mx.array,
        position_queries: mx.array,
        embed: Any,
        unembed: Any,
        scale: float,
        chosen: mx.array | None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """See AttendingCache. `chosen`: [t, 1, topk] positions of the plan's sparse tokens."""
        self._projections = Projections(embed, unembed)
        rows = mx.concatenate([queries, position_queries], axis=-1)[:, :, 0]
        key_size, sparse = queries.shape[-1], cast(SparsePlan, self._scope.plan).sparse
        scoring = Scoring(scale, sinks)
        if sparse is None:
            return self._attend_to_all(rows, key_size, scoring)[:, :, None]
        assert chosen is not None
        outputs = []
        if sparse.others is not None:
            outputs.append(self._attend_to_all(rows[sparse.others], key_size, scoring))
        latent = self._embedded(sparse.of_all(rows), key_size)
        plan, read_slots = self._scope.plan, sparse.read_slots_of(chosen)
        out = attend_to_chosen(self._kv_cache, plan, latent, read_slots, scoring, sparse.pace)
        outputs.append(self._unembedded(out))
        return sparse.in_order(outputs)[:, :, None]

    @property
    def _prompts(self) -> SeparatePrompts | None:
        return cast(PlanWithPrompts, self._scope.plan).prompts

    def _attend_to_all(self, queries: mx.array, key_size: int, scoring: Scoring) -> mx.array:
        """Attends with [t, H, key + rotated] unprojected queries; returns [t, H, value]."""
        if self._prompts is not None:
            return self._attend_separately(self._prompts, queries, key_size, scoring)
        return self._attend_in_latent_space(queries, key_size, scoring)

    def _attend_separately(
        self, plan: SeparatePrompts, queries: mx.array, key_size: int, scoring: Scoring
    ) -> mx.array:
        """Attends with [T, H, key + rotated] unprojected queries; returns [T, H, value]."""
        outputs = []
        if plan.others is not None:
            outputs.append(self._attend_in_latent_space(queries[plan.others], key_size, scoring))
        contexts = self._kv_cache.contexts(self._scope.plan, plan)
        for prompt, ((context,), _) in zip(plan.prompts, contexts, strict=True):
            rows = queries[prompt.first : prompt.first + prompt.num_rows]
            context = context.astype(queries.dtype)
            part = latent_heads.attend(rows, context, self._projections, scoring, plan.pace)
            outputs.append(part)
        out = joined(outputs)
        return out if plan.order is None else out[plan.order]

    def _attend_in_latent_space(
        self, queries: mx.array, key_size: int, scoring: Scoring
    ) -> mx.array:
        rows = self._embedded(queries, key_size)
        return self._unembedded(self._kv_cache.attend(self._scope.plan, rows, scoring))

    def _embedded(self, queries: mx.array, key_size: int) -> mx.array:
        """Projects [t, H, key + rotated] queries to [t, H, rank + rotated]."""
        keys, rotated = mx.split(queries.swapaxes(0, 1), [key_size], axis=-1)
        rows = mx.concatenate([self._projections.embed(keys), rotated], axis=-1)
        return rows.swapaxes(0, 1)

    def _unembedded(self, latents: mx.array) -> mx.array:
        """Projects [t, H, rank] to [t, H, value]."""
        return self._projections.unembed(latents.swapaxes(0, 1)).swapaxes(0, 1)


@cache
def _identity(size: int, dtype: mx.Dtype) -> mx.array:
    """Returns [1, 1, size, size], evaluated and cached so that graphs treat it as a constant."""
    identity = mx.eye(size, dtype=dtype)[None, None]
    mx.eval(identity)
    return identity
