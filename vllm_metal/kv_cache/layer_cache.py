# SPDX-License-Identifier: Apache-2.0
"""What the pool offers a layer, whoever computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from metal_kernels.op_common import CODE_DTYPES, SCALE_DTYPE
from metal_kernels.pace import Pace
from metal_kernels.paged_attention import AttentionShape


@dataclass(frozen=True)
class StepLayout:
    """Where a step's R requests and T rows lie in the pool, for one KV cache group."""

    query_start_loc_np: np.ndarray  # [R + 1] int32, first row of each request
    seq_lens_np: np.ndarray  # [R] int32, context including this step's rows
    block_tables_np: np.ndarray  # [R, W] int32
    slot_mapping_np: np.ndarray  # [T] int32, where each row's K/V go: block * block_size + offset
    block_size: int
    pace: Pace = field(default_factory=Pace)  # of the network, for all its groups


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


def row_bytes(head_size: int, dtype: mx.Dtype) -> int:
    """What one position's K, or V, takes in one head of a pool with elements of `dtype`."""
    return head_size * dtype.size + (SCALE_DTYPE.size if dtype in CODE_DTYPES else 0)


class LayerKVCache(ABC):
    """K and V of one layer, or of one layer of each KV cache group, for every block of the pool.

    Groups share kv_caches soundly: a block belongs to one group at a time.
    """

    #: Whether a step may be handed to the device while the one before still runs.
    pipelined: ClassVar[bool]
    #: Whether attention makes a dense copy of a context first, memory that a step needs on top.
    gathers: ClassVar[bool]

    def __init__(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: mx.Dtype
    ) -> None:
        """
        Args:
            num_blocks, block_size, num_kv_heads, head_size: of K and of V.
            dtype: of the pool's elements: the model's, or uint8 (fp8 e4m3) or int8 for codes.
        """
        shape = (num_kv_heads, num_blocks, block_size, head_size)
        self.keys = KVArray.empty(shape, dtype)
        self.values = KVArray.empty(shape, dtype)
        self.dtype = dtype

    @property
    def arrays(self) -> list[mx.array]:
        """All that the kv_cache holds, as it stands."""
        return [*self.keys.arrays, *self.values.arrays]

    @classmethod
    @abstractmethod
    def plan(cls, layout: StepLayout, shape: AttentionShape, window: int | None) -> Any:
        """What `write` and `attend` need of a step, for layers of one group, shape and window."""

    @classmethod
    def trials(cls, shape: AttentionShape, window: int | None) -> Iterable[Any]:
        """Small plans that launch, between them, every pipeline such layers may ever launch.

        Each has `num_tokens` rows, for the first slots of the pool, and a `pipeline`, which says
        what it launches; none where there are no kernels.
        """
        return ()

    def begin_step(self) -> None:
        """Called once before a step's first write."""
        return

    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copies whole blocks; after `begin_step`, before the step's first write."""
        copied = [array[:, mx.array(sources)] for array in self.arrays]
        mx.eval(copied)  # a queued read would have the whole pool copied
        self._put(targets, copied)

    def clear_blocks(self, blocks: np.ndarray) -> None:
        """Clears whole blocks; likewise."""
        self._put(blocks, [mx.zeros((), array.dtype) for array in self.arrays])

    def _put(self, blocks: np.ndarray, contents: Sequence[mx.array]) -> None:
        for array, content in zip(self.arrays, contents, strict=True):
            array[:, mx.array(blocks)] = content

    @abstractmethod
    def write(self, plan: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Takes the step's K/V, each [T, Hkv, D]; returns what to hand to `attend` for them."""

    @abstractmethod
    def attend(
        self,
        plan: Any,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """[T, H, D] queries over each row's context, K/V just written included; same shape back.

        The latter count as the pool will hold them. So a row that is found in the cache later on
        answers as it did in the step that computed it.
        """
