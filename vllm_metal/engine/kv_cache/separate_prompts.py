# SPDX-License-Identifier: Apache-2.0
"""Prompts that attend separately from a step's other requests, over K and V read from the pool."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import mlx.core as mx
import numpy as np

from metal_kernels.pace import Pace
from metal_kernels.paged_attention import buckets
from vllm_metal.engine.kv_cache.layer_state import StepLayout


@dataclass(frozen=True)
class Prompt:
    """One request's tokens in a step; the host knows its length."""

    first: int  # index of its first token in the step
    num_rows: int  # its tokens in the step
    context: int  # its tokens in the pool and the step
    stored: buckets.Bucket  # the context, padded
    begin: int = 0  # of a bidirectional run: tokens from here on are visible despite the window


@dataclass(frozen=True)
class SeparatePrompts:
    """Prompts of a step that attend separately, and the order of all tokens."""

    prompts: tuple[Prompt, ...]
    others: mx.array | None  # [t] int32, indices of all other tokens; None: there are none
    order: mx.array | None  # [T] int32, index of each token in others + prompts; None: identity
    pace: Pace | None = None  # where the step's command buffers end; None: where MLX ends them
    window: int | None = None  # for bidirectional runs: the layers' sliding window

    @staticmethod
    def of(layout: StepLayout, requests: np.ndarray) -> SeparatePrompts:
        """Makes prompts of the requests of the step that `requests`, [R] bool, selects."""
        prompts = tuple(_prompt(layout, index) for index in np.flatnonzero(requests).tolist())
        ours, others = layout.rows_of(requests), layout.rows_of(~requests)
        order = np.argsort(np.concatenate([others, ours])).astype(np.int32)
        in_order = (order == np.arange(len(order))).all()
        return SeparatePrompts(
            prompts,
            mx.array(others) if len(others) else None,
            None if in_order else mx.array(order),
        )


class PlanWithPrompts(Protocol):
    """A step's plan; some of the step's prompts may attend separately from it."""

    @property
    def prompts(self) -> SeparatePrompts | None:
        """Prompts that attend separately; None: all requests attend by the plan."""


def _prompt(layout: StepLayout, index: int) -> Prompt:
    first, end = layout.query_start_loc_np[index : index + 2].tolist()
    request = slice(index, index + 1)
    plan = buckets.plan(  # for the last token alone: its context is the whole prompt's
        np.array([0, 1], np.int32),
        layout.seq_lens_np[request],
        layout.block_tables_np[request],
        layout.slot_mapping_np,
        layout.block_size,
        bounded=True,
    )
    return Prompt(first, end - first, int(layout.seq_lens_np[index]), plan.buckets[0])


def without(layout: StepLayout, requests: np.ndarray) -> StepLayout:
    """Returns the layout without the selected requests ([R] bool), but with all tokens' slots."""
    starts, lens, tables = layout.arrays_without(requests)
    others = np.flatnonzero(~requests)
    return replace(
        layout,
        query_start_loc_np=starts,
        seq_lens_np=lens,
        block_tables_np=tables,
        req_indices_np=None if layout.req_indices_np is None else layout.req_indices_np[others],
        num_drafts_np=None if layout.num_drafts_np is None else layout.num_drafts_np[others],
        lag=layout.lag.of(others) if layout.lag is not None and len(others) else None,
    )
