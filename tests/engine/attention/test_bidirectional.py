# SPDX-License-Identifier: Apache-2.0
"""Bidirectional attention over both pools, against a row-by-row formula."""

from functools import partial

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from engine.kv_cache.layouts import layout_of

from metal_kernels import kernel
from metal_kernels.paged_attention import AttentionShape
from vllm_metal.engine.attention import bidirectional
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.layer_cache import AttentionKind, KVShape
from vllm_metal.engine.kv_cache.layer_state import Run
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.patches.mlx_patches.seam import Scoring

SHAPE = AttentionShape(4, 2, 64, 64)
#: Steps: of each request blocks, tokens computed before, rows; then runs of rows.
STEPS = [
    ([([3, 1], 0, 20), ([5], 0, 9)], (Run(4, 12, 4), Run(20, 29, 0))),
    # A decode; a prompt with text around an image; one whose image began in the step before.
    (
        [([6], 0, 1), ([3, 1, 2], 20, 28), ([5, 8], 9, 12)],
        (Run(5, 20, 24), Run(24, 29, 43), Run(29, 36, 4)),
    ),
    ([([7, 4], 0, 17)], (Run(0, 17, 0),)),
]


def naive(queries, keys, values, place, window, begins):
    """Returns [H, D] for the row at `place`; `begins`: start of its run, and the place after it."""
    begin, end = begins
    seen = [at for at in range(max(place + 1, end)) if at <= place or begin <= at < end]
    if window is not None:
        seen = [at for at in seen if at > place - window or begin <= at < end]
    outputs = []
    for head, query in enumerate(queries):
        rows = keys[seen][:, head // 2] @ query * 0.2
        weights = np.exp(rows - rows.max())
        outputs.append(weights / weights.sum() @ values[seen][:, head // 2])
    return np.stack(outputs)


@pytest.mark.parametrize("window", [None, 14])
@pytest.mark.parametrize("backend", [pytest.param(KERNELS, marks=pytest.mark.more), SCATTER])
def test_rows_see_all_of_their_run_and_what_is_before_it(backend, window):
    kind = AttentionKind(SHAPE, window)
    plan_of = partial(backend.plan, kind=kind)
    kv_cache = backend.allocate(10, 16, KVShape(2, 64, 64), mx.float32)
    kept, rng = {}, np.random.default_rng(5)
    with kernel.using(metal_interpreter.metal_kernel):
        for requests, runs in STEPS:
            step = layout_of(requests, runs=runs)
            slots = step.slot_mapping_np.tolist()
            keys, values = rng.normal(size=(2, len(slots), 2, 64)).astype(np.float32)
            queries = rng.normal(size=(len(slots), 4, 64)).astype(np.float32)
            kept |= {slot: (keys[row], values[row]) for row, slot in enumerate(slots)}
            plan = bidirectional.planned(step, window, plan_of)
            kv_cache.begin_step()
            kv_cache.write(plan, mx.array(keys), mx.array(values))
            found = bidirectional.attend(
                kv_cache, plan, plan.prompts, mx.array(queries), Scoring(0.2)
            )
            mx.eval(found)
            row = 0
            for blocks, before, count in requests:
                context = [kept[blocks[at // 16] * 16 + at % 16] for at in range(before + count)]
                all_keys, all_values = (np.stack(part) for part in zip(*context, strict=True))
                first = row
                for place in range(before, before + count):
                    run = next((run for run in runs if run.first <= row < run.end), None)
                    ends = (0, 0) if run is None else (run.begin, run.end - first + before)
                    expected = naive(queries[row], all_keys, all_values, place, window, ends)
                    np.testing.assert_allclose(np.array(found[row]), expected, atol=1e-4)
                    row += 1
