# SPDX-License-Identifier: Apache-2.0
"""A layer's K and V in the pool, and the interface of the backends that compute on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from metal_kernels.kv_write import Rotation
from metal_kernels.layout import BLOCK_SIZES
from metal_kernels.op_common import QUANTIZED_DTYPES, SCALE_DTYPE
from metal_kernels.paged_attention import AttentionShape, buckets
from metal_kernels.paged_attention.buckets import Bucket, BucketPlan
from vllm_metal.engine.kv_cache.layer_state import PlanT, StepLayout, Storage, Traceable
from vllm_metal.patches.mlx_patches.seam import Scoring

if TYPE_CHECKING:
    from vllm_metal.engine.kv_cache.separate_prompts import SeparatePrompts


class KVShape(NamedTuple):
    """Shape of a token's K and V in one layer."""

    num_heads: int
    key_size: int
    value_size: int
    latent: bool = False  # values are the first `value_size` elements of keys; no V is stored

    def times_in(self, other: KVShape) -> int:
        """Returns how many such shapes make up the heads of another; 0: their rows differ."""
        whole = self[1:] == other[1:] and other.num_heads % self.num_heads == 0
        return other.num_heads // self.num_heads if whole else 0


class AttentionKind(NamedTuple):
    """Layer properties that an attention plan depends on."""

    shape: AttentionShape
    window: int | None  # positions a query sees, itself included; None: no sliding window
    bidirectional: bool = False  # whether tokens see later ones of their request in the same step
    extent: int | None = None  # distances with a relative bias (`Scoring.bias`); None: no bias


class TrialPlan(Protocol):
    """A plan for compiling pipelines ahead of time."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens; the trial writes them to the first slots of the pool."""

    @property
    def pipeline(self) -> Hashable:
        """Key of the Metal pipelines that attention launches; equal keys launch the same ones."""


@dataclass
class KVArray:
    """K or V of all blocks: floats, or quantized values with a scale per token and head.

    Heads are the outermost axis, so a head's part of a block is contiguous for attention.
    """

    elements: mx.array  # [Hkv, B, block_size, D], floats or quantized: uint8 (fp8 e4m3) or int8
    scales: mx.array | None  # [Hkv, B, block_size] bfloat16, factors; None: not quantized

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: mx.Dtype) -> KVArray:
        """Returns zeros; `shape` and `dtype` are those of the elements."""
        scales = mx.zeros(shape[:3], SCALE_DTYPE) if dtype in QUANTIZED_DTYPES else None
        return cls(mx.zeros(shape, dtype), scales)

    @property
    def arrays(self) -> list[mx.array]:
        return [self.elements] if self.scales is None else [self.elements, self.scales]

    @arrays.setter
    def arrays(self, arrays: Sequence[mx.array]) -> None:
        self.elements, *others = arrays
        self.scales = others[0] if others else None


def parts_of(block_size: int) -> int:
    """Number of kernel blocks, of 16 or 32 tokens, that one block of the pool consists of.

    The pool's blocks are larger if recurrent layers share its memory: a block must hold a state.
    """
    return 1 if block_size <= BLOCK_SIZES[-1] else block_size // BLOCK_SIZES[0]


def row_bytes(head_size: int, dtype: mx.Dtype) -> int:
    """Bytes of one token's K or V in one head, scale included, for elements of `dtype`."""
    return head_size * dtype.size + (SCALE_DTYPE.size if dtype in QUANTIZED_DTYPES else 0)


class KVBackend(ABC, Generic[PlanT]):
    """Stores a pool's K and V and attends over them, with our kernels or MLX's operations.

    A pool has one backend. Equal backends behave the same.
    """

    pipelined: ClassVar[bool]  # see Storage
    #: Whether the pool holds a step's K and V only after the step.
    defers_writes: ClassVar[bool] = False

    @property
    @abstractmethod
    def gathers(self) -> bool:
        """Whether attention copies contexts out of the pool first, which takes step memory."""

    @property
    @abstractmethod
    def reads_contexts(self) -> bool:
        """Whether `LayerKVCache.contexts` is supported."""

    @abstractmethod
    def allocate(
        self, num_blocks: int, block_size: int, shape: KVShape, dtype: mx.Dtype
    ) -> LayerKVCache[PlanT]:
        """Returns a layer's K and V, all zeros, in the pool's dtype: see `formats.pool_dtype`."""

    def allocate_states(self, num_blocks: int, nbytes: int) -> LayerKVCache[PlanT]:
        """Returns memory for recurrent states only: a block is one token of one head.

        `nbytes` is the size of a state, a multiple of 4.
        """
        width = nbytes // mx.float32.size
        return self.allocate(num_blocks, 1, KVShape(1, width, width, latent=True), mx.float32)

    @abstractmethod
    def plan(self, layout: StepLayout, kind: AttentionKind) -> PlanT:
        """Plans `write` and `attend` of a step, for layers of one group and kind."""

    @abstractmethod
    def plan_of_writes(self, layout: StepLayout, num_kv_heads: int) -> PlanT:
        """Plans `write` of a step, for layers that do not attend."""

    def plan_of_contexts(self, layout: StepLayout) -> BucketPlan:
        """Groups a layout's requests for reads of their whole contexts (`LayerKVCache.keys_of`)."""
        slots_np = layout.slot_mapping_np
        return buckets.contexts(
            layout.query_start_loc_np,
            layout.seq_lens_np,
            layout.block_tables_np,
            slots_np if self.defers_writes else np.full_like(slots_np, -1),
            layout.block_size,
        )

    def trials(self, kind: AttentionKind, block_size: int) -> Iterable[TrialPlan]:
        """Yields small plans that together launch every Metal pipeline of layers of this kind.

        Yields none for backends without kernels.
        """
        return ()

    def waiting(
        self, kind: AttentionKind, context: int, num_tokens: int, dtype: mx.Dtype
    ) -> tuple[int, int]:
        """Estimates the memory of gathered contexts that several queued layers hold at once.

        Args:
            context: most tokens of a request.
            num_tokens: most tokens of a step.
            dtype: dtype of the queries.

        Returns:
            Bytes, without those of one prompt in one layer, and the fewest tokens of a prompt whose
            context is gathered.
        """
        return 0, 0


class LayerKVCache(Storage, Traceable, Generic[PlanT]):
    """K and V of one layer, or of one layer of each KV cache group, for all blocks of the pool.

    Rejected drafts need no rollback: a request's next tokens start at the position after its last
    accepted token, and no token sees later positions. So a step overwrites K/V of rejected drafts
    before it reads them.
    """

    block_axis = 1

    def __init__(
        self,
        backend: KVBackend[PlanT],
        num_blocks: int,
        block_size: int,
        shape: KVShape,
        dtype: mx.Dtype,
    ) -> None:
        self.backend = backend
        self.split = parts_of(block_size)
        self.value_size = shape.value_size
        blocks = (shape.num_heads, num_blocks * self.split, block_size // self.split)
        self.keys = KVArray.empty((*blocks, shape.key_size), dtype)
        self.values = None if shape.latent else KVArray.empty((*blocks, self.value_size), dtype)
        self.dtype = dtype
        self._input_dtype = dtype  # of the K and V last written, before they are quantized

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays of keys, then of values: elements, and scales if quantized."""
        keys, values = self.keys, self.values
        if keys.scales is None:  # read for each layer in each step
            return [keys.elements] if values is None else [keys.elements, values.elements]
        return [*keys.arrays, *(() if values is None else values.arrays)]

    @arrays.setter
    def arrays(self, arrays: Sequence[mx.array]) -> None:
        count = len(self.keys.arrays)
        self.keys.arrays = arrays[:count]
        if self.values is not None:
            self.values.arrays = arrays[count:]

    @property
    def inputs(self) -> list[mx.array]:
        return self.arrays

    @property
    def stored_values(self) -> KVArray:
        """The array that values are read from; for MLA latents, the keys."""
        return self.keys if self.values is None else self.values

    def elements_of(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """Picks the arrays of elements, without scales; each [Hkv, B * split, tokens, D]."""
        return list(arrays[:: len(self.keys.arrays)])

    @property
    def rotates(self) -> bool:
        """Whether `rotate_and_write` may be called."""
        return False

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a block's elements in K, and in V if it is stored."""
        elements = self.elements_of(self.arrays)
        return [array.nbytes // array.shape[1] * self.split for array in elements]

    @abstractmethod
    def read_states(self, plan: object, blocks: mx.array, width: int) -> mx.array:
        """Reads recurrent states from [n] int32 blocks (metal_kernels/kv_states), in a forward.

        Returns [n, width] unsigned integers of the pool's element size.
        """

    @abstractmethod
    def write_states(self, blocks_np: np.ndarray, states: mx.array) -> None:
        """Writes states from `read_states` into [n] distinct blocks, between forwards."""

    @abstractmethod
    def write(self, plan: PlanT, keys: mx.array, values: mx.array) -> None:
        """Writes the step's K and V, each [T, Hkv, D], of the layer that attends next."""

    def rotate_and_write(
        self,
        plan: PlanT,
        keys: mx.array,
        values: mx.array,
        positions: mx.array,
        rotation: Rotation,
        queries: mx.array | None = None,
    ) -> mx.array | None:
        """Applies RoPE to keys, and to queries if given, and writes K and V.

        Args:
            keys: [T, Hkv, D]; for MLA latents [T, 1, D - n], the elements without RoPE.
            values: [T, Hkv, DV]; for MLA latents [T, 1, n], the elements of keys with RoPE.
            positions: [max(T, 8)] int32.
            queries: [T, H, D].

        Returns:
            The rotated queries.
        """
        raise NotImplementedError(f"{type(self).__name__} does not rotate")

    @abstractmethod
    def attend(self, plan: PlanT, queries: mx.array, scoring: Scoring) -> mx.array:
        """Attends with [T, H, D] queries to each token's context; returns [T, H, DV].

        K/V of this step are quantized first if the pool is, so a later prefix-cache hit gives the
        same outputs as this step.
        """

    @abstractmethod
    def contexts(self, plan: PlanT, prompts: SeparatePrompts) -> list[tuple[mx.array, mx.array]]:
        """Returns [Hkv, S, D] keys and [Hkv, S, DV] values of each prompt's context.

        Called after the layer's `write` and, if the step has other tokens, their `attend`. For MLA
        latents the values are the keys.
        """

    @abstractmethod
    def keys_of(self, plan: PlanT, bucket: Bucket) -> mx.array:
        """Returns the keys of a bucket's contexts, [Hkv, n, S, D]; called after `write`.

        Slots past the end of a context have arbitrary content. `bucket` is of
        `KVBackend.plan_of_contexts`.
        """

    @abstractmethod
    def rows_at(self, plan: PlanT, read_slots: mx.array) -> tuple[mx.array, mx.array]:
        """Returns keys and values of [n, C, k] int32 slots, each [n, C, k, D]; see `sparse_tokens`.

        The C parts of `read_slots` belong to the K/V heads in turn, C / Hkv each. Called after
        `write`. Reads no other rows of the pool; ABSENT gives zeros.
        """
