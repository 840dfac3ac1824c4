# SPDX-License-Identifier: Apache-2.0
"""What the pool offers a layer, whoever computes it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from metal_kernels.paged_attention import AttentionShape


@dataclass(frozen=True)
class StepLayout:
    """Where a step's R requests and T rows lie in the pool, for one KV cache group."""

    query_start_loc_np: np.ndarray  # [R + 1] int32, first row of each request
    seq_lens_np: np.ndarray  # [R] int32, context including this step's rows
    block_tables_np: np.ndarray  # [R, W] int32
    slot_mapping_np: np.ndarray  # [T] int32, where each row's K/V go: block * block_size + offset
    block_size: int


class Region(ABC):
    """K and V of one layer, or of one layer of each KV cache group, for every block of the pool.

    Groups share regions soundly: a block belongs to one group at a time.
    """

    #: Whether a step may be handed to the device while the one before still runs.
    pipelined: ClassVar[bool]

    def __init__(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, dtype: mx.Dtype
    ) -> None:
        # Head outermost: what attention reads of a head's block is then in one piece.
        shape = (num_kv_heads, num_blocks, block_size, head_size)
        self.keys = mx.zeros(shape, dtype)  # [Hkv, B, block_size, D]
        self.values = mx.zeros(shape, dtype)  # [Hkv, B, block_size, D]

    @staticmethod
    @abstractmethod
    def plan(layout: StepLayout, shape: AttentionShape, window: int | None) -> Any:
        """What `write` and `attend` need of a step, for layers of one group, shape and window."""

    def begin_step(self) -> None:
        """Called once before a step's first write."""
        return

    @abstractmethod
    def copy_blocks(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copies whole blocks; after `begin_step`, before the step's first write."""

    @abstractmethod
    def zero_blocks(self, blocks: np.ndarray) -> None:
        """Clears whole blocks; likewise."""

    @abstractmethod
    def write(self, plan: Any, keys: mx.array, values: mx.array) -> None:
        """Takes the step's K/V, each [T, Hkv, D]."""

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
        """[T, H, D] queries over each row's context, K/V just written included; same shape back."""
