# SPDX-License-Identifier: Apache-2.0
"""Bidirectional attention within an image.

A step's requests are split where such a run of tokens begins and ends; the pieces in between are
treated as prompts. A run attends with MLX's operations over K and V read from the pool, the whole
run included. With a sliding window, a token sees the window before it and the whole run
(`or_mask_function` of transformers' gemma3). A run may also be bidirectional only in layers with a
window, and within the window (`create_masks_for_vision_model` of transformers' gemma4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from vllm_metal.engine.kv_cache.layer_cache import LayerKVCache
from vllm_metal.engine.kv_cache.layer_state import PlanT, Run, StepLayout, joined
from vllm_metal.engine.kv_cache.separate_prompts import Prompt, SeparatePrompts, without
from vllm_metal.patches.mlx_patches.seam import Scoring


def has_runs(layout: StepLayout, window: int | None) -> bool:
    """Whether the step has bidirectional runs for layers with this sliding window."""
    return any(window is not None or not run.windowed for run in layout.runs)


def planned(layout: StepLayout, window: int | None, plan_of: Callable[[StepLayout], Any]) -> Any:
    """Returns a step's plan: bidirectional runs attend as its `prompts`, all other tokens as usual.

    `plan_of` plans the attention of the other tokens, and the writes of all tokens.
    """
    cut, whole = _split_at_runs(layout)
    found = SeparatePrompts.of(cut, whole)
    by_row = {run.first: run for run in layout.runs}
    runs = tuple(_with_begin(each, by_row[each.first]) for each in found.prompts)
    separate = replace(found, prompts=runs, window=window)
    return replace(plan_of(without(cut, whole)), prompts=separate)


def _split_at_runs(layout: StepLayout) -> tuple[StepLayout, np.ndarray]:
    """Splits requests into runs and the pieces between; returns a layout of R' and [R'] is_run."""
    of_runs = np.array([(run.first, run.end) for run in layout.runs]).ravel()
    cut = layout.cut_at(of_runs)
    edges = cut.query_start_loc_np
    return cut, np.isin(edges[:-1], [run.first for run in layout.runs])


def _with_begin(prompt: Prompt, run: Run) -> Prompt:
    """Sets `begin` of a run: from there on, tokens are visible regardless of the window."""
    return replace(prompt, begin=prompt.context if run.windowed else run.begin)


def attend(
    kv_cache: LayerKVCache[PlanT],
    plan: PlanT,
    separate: SeparatePrompts,
    queries: mx.array,
    scoring: Scoring,
) -> mx.array:
    """Attends with [T, H, D] queries after the layer's write; returns [T, H, DV].

    Args:
        plan: the step's plan, for tokens outside of runs.
        separate: the runs of the step.

    Raises:
        NotImplementedError: `scoring` has sinks, a soft cap or a bias.
    """
    if any(part is not None for part in scoring[1:]):
        raise NotImplementedError(
            "bidirectional attention within an image is not supported with sinks, a soft cap or a "
            "relative bias"
        )
    outputs = []
    if separate.others is not None:
        outputs.append(kv_cache.attend(plan, queries[separate.others], scoring))
    of_run = partial(_attend_to, window=separate.window, scoring=scoring)
    for run, (keys, values) in zip(
        separate.prompts, kv_cache.contexts(plan, separate), strict=True
    ):
        rows = queries[run.first : run.first + run.num_rows]
        outputs.append(of_run(run, rows, keys, values).astype(queries.dtype))
    out = joined(outputs)
    return out if separate.order is None else out[separate.order]


def _attend_to(
    run: Prompt,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    window: int | None,
    scoring: Scoring,
) -> mx.array:
    """Attends with a run's [n, H, D] queries to [Hkv, S, D] K and V; returns [n, H, DV]."""
    rows, start, mask = np.arange(run.context - run.num_rows, run.context), 0, None
    if window is not None:
        start = max(min(run.begin, int(rows[0]) - window + 1), 0)  # earlier blocks may be freed
        positions = np.arange(start, run.context)
        seen = (positions > rows[:, None] - window) | (positions >= run.begin)
        mask = None if seen.all() else mx.array(seen)
    out = mx.fast.scaled_dot_product_attention(
        queries.swapaxes(0, 1)[None].astype(keys.dtype),
        keys[None, :, start:],
        values[None, :, start:],
        scale=scoring.scale,
        mask=mask,
    )
    return out[0].swapaxes(0, 1)
