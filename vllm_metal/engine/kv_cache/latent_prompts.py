# SPDX-License-Identifier: Apache-2.0
"""Chooses MLA prompts that attend with per-head K and V, expanded from the latents in the pool.

Attention over latents (the "absorbed" form of DeepSeek-V2, arXiv:2405.04434) takes
2 * (2 * rank + rotated) FLOPs per query, key and head. With expanded K and V it takes
2 * (key + rotated + value), plus 2 * rank * (key + value) per key and head for the expansion. So
expanding is less work for requests with enough tokens in the step, at any context length: 171 for
DeepSeek-V3, 399 for GLM-4.7-Flash.
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
    """Sizes of MLA heads, in elements."""

    num_heads: int
    rank: int  # of a latent
    rotated: int  # of the rotated key part, which all heads share
    key: int  # of a head's key, without the rotated part
    value: int

    @property
    def fewest_rows(self) -> int | None:
        """Fewest tokens of a request for which expanding K and V is less work; None: never."""
        saved = 2 * self.rank - self.key - self.value
        if saved <= 0:
            return None
        built = self.rank * (self.key + self.value)
        return max(-(-built // saved), buckets.DECODE_ROWS + 1)

    def work(self, num_rows: int, context: int) -> int:
        """FLOPs to expand a context and to attend to it with `num_rows` queries."""
        built = self.rank * (self.key + self.value)
        attended = num_rows * (self.key + self.rotated + self.value)
        return 2 * context * self.num_heads * (built + attended)


def planned(
    layout: StepLayout, heads: LatentHeads | None, plan_of: Callable[[StepLayout], Any]
) -> Any:
    """Returns a step's plan for MLA layers, with its `prompts` set.

    Args:
        heads: sizes of the layers' heads; None: all requests attend to latents.
        plan_of: plans a layout of the requests that attend to latents. The plan must write the
            tokens of all requests.
    """
    requests = _select(layout, None if heads is None else heads.fewest_rows)
    if heads is None or not requests.any():
        return plan_of(layout)
    plan, pace = plan_of(without(layout, requests)), layout.pace
    found = SeparatePrompts.of(layout, requests)
    if pace is not None:
        work = sum(heads.work(prompt.num_rows, prompt.context) for prompt in found.prompts)
        pace = plan.pace or pace_of(pace, int(layout.query_start_loc_np[-1]), work)
    return replace(plan, prompts=replace(found, pace=pace), pace=pace)


def _select(layout: StepLayout, fewest_rows: int | None) -> np.ndarray:
    """[R] bool, requests with at least `fewest_rows` tokens and a length that the host knows."""
    lens = np.diff(layout.query_start_loc_np)
    if fewest_rows is None:
        return np.zeros(len(lens), bool)
    requests = lens >= fewest_rows
    if layout.lag is not None:
        requests &= layout.lag.most_np == 0
    return requests
