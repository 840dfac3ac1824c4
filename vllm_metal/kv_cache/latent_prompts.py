# SPDX-License-Identifier: Apache-2.0
"""Which prompts attend by keys and values of heads, which are built from the latents in the pool.

Rows attend to latents themselves (the "absorbed" form of DeepSeek-V2, arXiv:2405.04434) for
2 * (2 * rank + rotated) FLOPs a row, key and head. By a head's own keys and values they are
2 * (key + rotated + value), once these are built, for 2 * rank * (key + value) a key and head. So
it is less work from some number of rows on, whatever the context: 171 for DeepSeek-V3, 399 for
GLM-4.7-Flash.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from metal_kernels.pace import Pace, pace_of
from metal_kernels.paged_attention import buckets
from vllm_metal.kv_cache.layer_state import StepLayout


class LatentHeads(NamedTuple):
    """Heads whose keys and values are made of a latent, and of rotated keys that all share."""

    num_heads: int
    rank: int  # elements of a latent
    rotated: int
    key: int  # of a head, without those that are rotated
    value: int

    @property
    def fewest_rows(self) -> int | None:
        """Rows of a request from which on its keys and values are worth building; None: never."""
        saved = 2 * self.rank - self.key - self.value
        if saved <= 0:
            return None
        built = self.rank * (self.key + self.value)
        return max(-(-built // saved), buckets.DECODE_ROWS + 1)

    def work(self, num_rows: int, context: int) -> int:
        """FLOPs of what is built of a context, and of so many rows that attend to it."""
        built = self.rank * (self.key + self.value)
        attended = num_rows * (self.key + self.rotated + self.value)
        return 2 * context * self.num_heads * (built + attended)


@dataclass(frozen=True)
class Prompt:
    """The last rows of one request's context, none of which the device alone knows."""

    first: int  # of the step's rows
    num_rows: int
    context: int  # tokens, these included
    places: buckets.Bucket  # where they lie; its own context may be longer


@dataclass(frozen=True)
class LatentPrompts:
    """The prompts of a step that attend so; what else there is attends to latents."""

    prompts: tuple[Prompt, ...]
    others: mx.array | None  # [t] int32, batch rows of all other requests; None: there are none
    order: mx.array | None  # [T] int32, place of each row behind the others', then these; None: t
    pace: Pace | None = None  # where the step's command buffers end; None: where MLX ends them

    @staticmethod
    def of(layout: StepLayout, requests: np.ndarray) -> LatentPrompts:
        """These of a step's requests, [R] bool."""
        prompts = tuple(_prompt(layout, index) for index in np.flatnonzero(requests).tolist())
        ours, others = layout.rows_of(requests), layout.rows_of(~requests)
        order = np.argsort(np.concatenate([others, ours])).astype(np.int32)
        in_order = (order == np.arange(len(order))).all()
        return LatentPrompts(
            prompts,
            mx.array(others) if len(others) else None,
            None if in_order else mx.array(order),
        )


class PlanWithPrompts(Protocol):
    """A step's plan for layers of latents."""

    @property
    def prompts(self) -> LatentPrompts | None:
        """None: all rows attend to latents."""


def planned(
    layout: StepLayout, heads: LatentHeads | None, plan_of: Callable[[StepLayout], Any]
) -> Any:
    """A step's plan for layers of latents, with its `prompts`.

    Args:
        layout: of the step.
        heads: of the layers; None: all rows attend to latents.
        plan_of: makes a plan for requests, some of the step's, that attend to latents; it writes
            the rows of all.
    """
    requests = _chosen(layout, None if heads is None else heads.fewest_rows)
    if heads is None or not requests.any():
        return plan_of(layout)
    plan, pace = plan_of(_without(layout, requests)), layout.pace
    found = LatentPrompts.of(layout, requests)
    if pace is not None:
        work = sum(heads.work(prompt.num_rows, prompt.context) for prompt in found.prompts)
        pace = plan.pace or pace_of(pace, int(layout.query_start_loc_np[-1]), work)
    return replace(plan, prompts=replace(found, pace=pace), pace=pace)


def _chosen(layout: StepLayout, fewest_rows: int | None) -> np.ndarray:
    """[R] bool, requests with so many rows, whose lengths the host knows."""
    lens = np.diff(layout.query_start_loc_np)
    if fewest_rows is None:
        return np.zeros(len(lens), bool)
    requests = lens >= fewest_rows
    if layout.behind is not None:
        requests &= layout.behind.most_np == 0
    return requests


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


def _without(layout: StepLayout, requests: np.ndarray) -> StepLayout:
    """The layout of the others, beside the slots of all rows."""
    starts, lens, tables = layout.others_than(requests)
    others = np.flatnonzero(~requests)
    return replace(
        layout,
        query_start_loc_np=starts,
        seq_lens_np=lens,
        block_tables_np=tables,
        req_indices_np=None if layout.req_indices_np is None else layout.req_indices_np[others],
        num_drafts_np=None if layout.num_drafts_np is None else layout.num_drafts_np[others],
        behind=layout.behind.of(others) if layout.behind is not None and len(others) else None,
    )
