# SPDX-License-Identifier: Apache-2.0
"""Prompts of a step that do not attend as the rest does, but over their context as it is read."""

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
    """The last rows of one request's context, none of which the device alone knows."""

    first: int  # of the step's rows
    num_rows: int
    context: int  # tokens, these included
    places: buckets.Bucket  # where they lie; its own context may be longer
    begin: int = 0  # of rows that see each other, the place of the first, computed before or now


@dataclass(frozen=True)
class SeparatePrompts:
    """Prompts of a step that attend over their context as it is read; the others as ever."""

    prompts: tuple[Prompt, ...]
    others: mx.array | None  # [t] int32, batch rows of all others; None: there are none
    order: mx.array | None  # [T] int32, place of each row behind the others', then these; None: t
    pace: Pace | None = None  # where the step's command buffers end; None: where MLX ends them
    window: int | None = None  # of rows that see each other: what each sees before them

    @staticmethod
    def of(layout: StepLayout, requests: np.ndarray) -> SeparatePrompts:
        """These of a step's requests, [R] bool."""
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
    """A step's plan, of which some prompts may be left out."""

    @property
    def prompts(self) -> SeparatePrompts | None:
        """None: nothing is left out."""


def _prompt(layout: StepLayout, index: int) -> Prompt:
    first, end = layout.query_start_loc_np[index : index + 2].tolist()
    request = slice(index, index + 1)
    plan = buckets.plan(  # as of its last row: what is before that is the whole context
        np.array([0, 1], np.int32),
        layout.seq_lens_np[request],
        layout.block_tables_np[request],
        layout.slot_mapping_np,
        layout.block_size,
        bounded=True,
    )
    return Prompt(first, end - first, int(layout.seq_lens_np[index]), plan.buckets[0])


def without(layout: StepLayout, requests: np.ndarray) -> StepLayout:
    """The layout of all others than [R] bool requests, beside the slots of all rows."""
    starts, lens, tables = layout.others_than(requests)
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
