# SPDX-License-Identifier: Apache-2.0
"""K and V of a layer in the pool, whoever computes on them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from metal_kernels.kv_write import Rotation
from metal_kernels.layout import BLOCK_SIZES
from metal_kernels.op_common import CODE_DTYPES, SCALE_DTYPE
from metal_kernels.paged_attention import AttentionShape
from vllm_metal.engine.kv_cache.layer_state import PlanT, StepLayout, Storage, Traceable
from vllm_metal.patches.mlx_patches.seam import Scoring

if TYPE_CHECKING:
    from vllm_metal.engine.kv_cache.separate_prompts import SeparatePrompts


class KVShape(NamedTuple):
    """What a layer keeps of a token: a row of K and one of V for each head."""

    num_heads: int
    key_size: int
    value_size: int
    latent: bool = False  # values are the first `value_size` elements of keys, and kept as such


class AttentionKind(NamedTuple):
    """What a plan of attention depends on, beside the step."""

    shape: AttentionShape
    window: int | None  # positions a query sees, itself included; None: all before it
    bidirectional: bool = False  # whether rows of a request see those of the step after them


class TrialPlan(Protocol):
    """A plan that is made to compile what it launches."""

    @property
    def num_tokens(self) -> int:
        """Rows, for the first slots of the pool."""

    @property
    def pipeline(self) -> Hashable:
        """What attention launches; equal for plans that launch the same."""


@dataclass
class KVArray:
    """K, or V, for every block: values, or codes with a scale for each row of each head.

    Head outermost: what attention reads of a head's block is then in one piece.
    """

    elements: mx.array  # [Hkv, B, block_size, D], of values, or uint8 (fp8 e4m3) or int8 codes
    scales: mx.array | None  # [Hkv, B, block_size] bfloat16, value = code * scale; None: of values

    @classmethod
    def empty(cls, shape: tuple[int, int, int, int], dtype: mx.Dtype) -> KVArray:
        """Zeros; `shape` is that of the elements, `dtype` theirs."""
        scales = mx.zeros(shape[:3], SCALE_DTYPE) if dtype in CODE_DTYPES else None
        return cls(mx.zeros(shape, dtype), scales)

    @property
    def arrays(self) -> list[mx.array]:
        return [self.elements] if self.scales is None else [self.elements, self.scales]

    @arrays.setter
    def arrays(self, arrays: Sequence[mx.array]) -> None:
        self.elements, *others = arrays
        self.scales = others[0] if others else None


def parts_of(block_size: int) -> int:
    """How many blocks attention makes of one of the pool: it works on 16 or 32 tokens at a time.

    Blocks are larger where layers with a recurrent state share the pool's memory: one has room for
    a state.
    """
    return 1 if block_size <= BLOCK_SIZES[-1] else block_size // BLOCK_SIZES[0]


def row_bytes(head_size: int, dtype: mx.Dtype) -> int:
    """What one position's K, or V, takes in one head of a pool with elements of `dtype`."""
    return head_size * dtype.size + (SCALE_DTYPE.size if dtype in CODE_DTYPES else 0)


class KVBackend(ABC, Generic[PlanT]):
    """How a pool's K and V are kept and attended over: by our kernels, or by MLX's operations.

    One value for a whole pool; equal ones serve alike.
    """

    pipelined: ClassVar[bool]  # see Storage

    @property
    @abstractmethod
    def gathers(self) -> bool:
        """Whether attention makes a dense copy of a context first, memory that a step needs."""

    @property
    @abstractmethod
    def reads_contexts(self) -> bool:
        """Whether `LayerKVCache.contexts` may be asked for."""

    @abstractmethod
    def allocate(
        self, num_blocks: int, block_size: int, shape: KVShape, dtype: mx.Dtype
    ) -> LayerKVCache[PlanT]:
        """K and V of a layer, all zeros.

        Args:
            num_blocks: of the pool.
            block_size: tokens of a block.
            shape: of a token's K and V.
            dtype: of the pool's elements: the model's, or uint8 (fp8 e4m3) or int8 for quantized
                values.
        """

    def allocate_states(self, num_blocks: int, nbytes: int) -> LayerKVCache[PlanT]:
        """Memory for states alone: a block is one row of one head.

        Args:
            num_blocks: of the pool.
            nbytes: of a state, a multiple of 4.
        """
        width = nbytes // mx.float32.size
        return self.allocate(num_blocks, 1, KVShape(1, width, width, latent=True), mx.float32)

    @abstractmethod
    def plan(self, layout: StepLayout, kind: AttentionKind) -> PlanT:
        """What `write` and `attend` need of a step, for layers of one group and kind."""

    @abstractmethod
    def plan_of_writes(self, layout: StepLayout, num_kv_heads: int) -> PlanT:
        """What `write` needs of a step, for layers of so many K/V heads that do not attend."""

    def trials(self, kind: AttentionKind, block_size: int) -> Iterable[TrialPlan]:
        """Small plans that launch, between them, every pipeline such layers may ever launch.

        None where there are no kernels.
        """
        return ()

    def waiting(
        self, kind: AttentionKind, context: int, num_tokens: int, dtype: mx.Dtype
    ) -> tuple[int, int]:
        """What prompts have gathered in several layers while the device is at the first of them.

        Args:
            kind: of the layers.
            context: tokens of a request, at most.
            num_tokens: of a step, at most.
            dtype: of their queries.

        Returns:
            Bytes, beside what one prompt gathers in one layer, and the rows of the shortest prompt
            that does.
        """
        return 0, 0


class LayerKVCache(Storage, Traceable, Generic[PlanT]):
    """K and V of one layer, or of one layer of each KV cache group, for every block of the pool.

    Rejected drafts leave nothing to restore: a request's next rows start at the position after its
    last accepted token, and no row sees positions after its own. So a step writes over K/V of
    rejected drafts before it reads them.
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
        """
        Args:
            backend: that makes it, and its plans.
            num_blocks, block_size, shape, dtype: see `KVBackend.allocate`.
        """
        self.backend = backend
        self.split = parts_of(block_size)
        self.value_size = shape.value_size
        blocks = (shape.num_heads, num_blocks * self.split, block_size // self.split)
        self.keys = KVArray.empty((*blocks, shape.key_size), dtype)
        self.values = None if shape.latent else KVArray.empty((*blocks, self.value_size), dtype)
        self.dtype = dtype
        self._row_dtype = dtype  # of the rows last written, before they are encoded

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays of keys, then of values: elements, and scales where the elements are codes."""
        return [*self.keys.arrays, *(() if self.values is None else self.values.arrays)]

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
    def held_values(self) -> KVArray:
        """What values are read from: of latents, the keys."""
        return self.keys if self.values is None else self.values

    def elements_of(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """Picks the element arrays of K and V, without their scales, from `arrays`; each
        [Hkv, B * split, rows, D]."""
        return list(arrays[:: len(self.keys.arrays)])

    @property
    def rotates(self) -> bool:
        """Whether `rotate_and_write` may be called."""
        return False

    @property
    def block_bytes(self) -> list[int]:
        """Bytes of a block's elements in K, and in V where there is one."""
        elements = self.elements_of(self.arrays)
        return [array.nbytes // array.shape[1] * self.split for array in elements]

    @abstractmethod
    def read_states(self, plan: object, blocks: mx.array, width: int) -> mx.array:
        """States that lie in the memory of K and V (metal_kernels/kv_states), within a forward.

        Args:
            plan: of the layer that reads.
            blocks: [n] int32.
            width: elements of a state.

        Returns:
            [n, width] unsigned integers of the pool's element size.
        """

    @abstractmethod
    def write_states(self, blocks_np: np.ndarray, states: mx.array) -> None:
        """Puts states as `read_states` gives them into [n] blocks, none twice, between forwards."""

    @abstractmethod
    def write(self, plan: PlanT, keys: mx.array, values: mx.array) -> None:
        """Takes the step's K/V, each [T, Hkv, D], of the layer that attends next."""

    def rotate_and_write(
        self,
        plan: PlanT,
        keys: mx.array,
        values: mx.array,
        positions: mx.array,
        rotation: Rotation,
        queries: mx.array | None = None,
    ) -> mx.array | None:
        """As `write`, of keys that are to be rotated by position first.

        Args:
            plan: of the step.
            keys: [T, Hkv, D]; of latents [T, 1, D - n], those elements that are not rotated.
            values: [T, Hkv, DV]; of latents [T, 1, n], the elements of keys that are.
            positions: [max(T, 8)] int32.
            rotation: of keys and queries.
            queries: [T, H, D], to be rotated alike; None: none are.

        Returns:
            The rotated queries.
        """
        raise NotImplementedError(f"{type(self).__name__} does not rotate")

    @abstractmethod
    def attend(self, plan: PlanT, queries: mx.array, scoring: Scoring) -> mx.array:
        """[T, H, D] queries over each row's context, K/V just written included; [T, H, DV] back.

        The rows just written count as the pool will hold them. So a row that is found in the cache
        later on answers as it did in the step that computed it.
        """

    @abstractmethod
    def contexts(self, plan: PlanT, prompts: SeparatePrompts) -> list[tuple[mx.array, mx.array]]:
        """[Hkv, S, D] keys and [Hkv, S, DV] values of each prompt's context; one, of latents.

        Of a layer that has just written its rows. As `attend` counts them. The step's other rows
        have attended, if there are any.
        """
