# SPDX-License-Identifier: Apache-2.0
"""Decides which of a step's rows attend by MLX's attention, over gathered contexts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import numpy as np

from metal_kernels.paged_attention import buckets
from vllm_metal.kv_cache.layer_cache import AttentionKind
from vllm_metal.kv_cache.layer_state import StepLayout

#: Kinds of rows: of requests with buckets.DECODE_ROWS rows at most in a step, and with more.
Phase = Literal["decode", "prefill"]


@dataclass(frozen=True)
class GatheredPlan:
    """Which of a step's rows attend so, and how."""

    attention: buckets.BucketPlan
    rows: mx.array | None  # [G] int32, batch rows that attend so; None: all of the step's
    others: mx.array | None  # [T - G] int32, batch rows that the kernels serve; None: none
    order: mx.array | None  # [T] int32, place of each row behind the kernels', then these; None: t

    @property
    def num_tokens(self) -> int:
        return self.attention.num_tokens

    def work(self, kind: AttentionKind) -> int:
        """FLOPs of a layer."""
        shape = kind.shape
        sizes = shape.head_size + shape.value_size
        return sum(bucket.work(shape.num_heads, sizes) for bucket in self.attention.buckets)


def chosen(layout: StepLayout, phases: Collection[Phase]) -> np.ndarray:
    """[R] bool, requests whose rows attend so.

    Masks are made on the host, so requests whose lengths only the device knows are left out.
    """
    prefills = np.diff(layout.query_start_loc_np) > buckets.DECODE_ROWS
    requests = (prefills & ("prefill" in phases)) | (~prefills & ("decode" in phases))
    if layout.behind is not None:
        requests &= layout.behind.most_np == 0
    return requests


def plan(layout: StepLayout, requests: np.ndarray, window: int | None) -> GatheredPlan:
    """The plan for these of a step's requests.

    Args:
        layout: of the step.
        requests: [R] bool, one at least.
        window: of the layers.
    """
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    lens = np.diff(layout.query_start_loc_np)[requests]
    attention = buckets.plan(
        np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        layout.seq_lens_np[requests],
        layout.block_tables_np[requests],
        np.full(lens.sum(), -1, np.int32),  # nothing is laid over the pool's rows
        layout.block_size,
        window,
        causal=on_gpu,
    )
    if requests.all():
        return GatheredPlan(attention, None, None, None)
    ours, others = layout.rows_of(requests), layout.rows_of(~requests)
    order = np.argsort(np.concatenate([others, ours])).astype(np.int32)
    in_order = (order == np.arange(len(order))).all()
    return GatheredPlan(
        attention, mx.array(ours), mx.array(others), None if in_order else mx.array(order)
    )
