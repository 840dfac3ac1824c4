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
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from metal_kernels.pace import pace_of
from metal_kernels.paged_attention import buckets
from vllm_metal.engine.kv_cache.layer_state import StepLayout
from vllm_metal.engine.kv_cache.separate_prompts import SeparatePrompts, without


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
    plan, pace = plan_of(without(layout, requests)), layout.pace
    found = SeparatePrompts.of(layout, requests)
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
    if layout.lag is not None:
        requests &= layout.lag.most_np == 0
    return requests
