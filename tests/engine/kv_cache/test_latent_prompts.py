# SPDX-License-Identifier: Apache-2.0
"""Prompts that use expanded keys and values, and their contexts in both pools."""

from functools import partial

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from engine.kv_cache.layouts import layout_of
from pairs import valuewise

from metal_kernels import kernel
from metal_kernels.layout import PositionLag
from metal_kernels.pace import Pace
from metal_kernels.paged_attention import AttentionShape
from tests.metal_kernels.hazards import Logger, prove_always
from vllm_metal.engine.kv_cache.kernels import KERNELS
from vllm_metal.engine.kv_cache.latent_prompts import LatentHeads, planned
from vllm_metal.engine.kv_cache.layer_cache import AttentionKind, KVShape
from vllm_metal.engine.kv_cache.scatter import SCATTER
from vllm_metal.patches.mlx_patches.seam import Scoring

HEADS = LatentHeads(num_heads=2, rank=512, rotated=64, key=4, value=4)  # worth it from 17 rows on
KIND = AttentionKind(AttentionShape(2, 1, 576, 512), None)
#: A pool's own steps: each request's blocks, tokens computed before, and rows.
STEPS = [
    [([3, 1], 0, 20), ([5], 0, 9)],
    [([6], 0, 3), ([3, 1, 2], 20, 21), ([5], 9, 1)],
    # Both long; the first begins with a block that the second fills in this step.
    [([7, 4], 16, 17), ([7], 0, 16), ([5, 8, 9], 10, 30)],
    [([3, 1, 2], 41, 1), ([5, 8, 9], 40, 2)],
]


@pytest.mark.parametrize(
    ("heads", "fewest"),
    [
        (LatentHeads(128, 512, 64, 128, 128), 171),  # DeepSeek-V3
        (LatentHeads(20, 512, 64, 192, 256), 399),  # GLM-4.7-Flash
        (LatentHeads(4, 32, 8, 4, 4), 17),  # no fewer than make a prompt
        (LatentHeads(4, 32, 8, 32, 32), None),  # heads as large as latents
    ],
)
def test_from_how_many_rows_on_less_work_is_done(heads, fewest):
    assert heads.fewest_rows == fewest
    if fewest and fewest > 17:
        absorbed = partial(_absorbed_work, heads)
        assert heads.work(fewest, 1000) <= absorbed(fewest, 1000)
        assert heads.work(fewest - 1, 1000) > absorbed(fewest - 1, 1000)


def _absorbed_work(heads, num_rows, context):
    return 2 * num_rows * context * heads.num_heads * (2 * heads.rank + heads.rotated)


def plan_of(backend, step):
    return planned(step, HEADS, partial(backend.plan, kind=KIND))


@pytest.mark.parametrize("backend", [KERNELS, SCATTER])
def test_prompts_are_picked_and_the_others_keep_their_order(backend):
    plan = plan_of(backend, layout_of(STEPS[1])).prompts
    (prompt,) = plan.prompts
    assert (prompt.first, prompt.num_rows, prompt.context) == (3, 21, 41)
    assert plan.others.tolist() == [0, 1, 2, 24]
    behind_others = [*plan.others.tolist(), *range(3, 24)]
    assert [behind_others[place] for place in plan.order.tolist()] == list(range(25))
    assert plan_of(backend, layout_of(STEPS[3])).prompts is None
    alone = plan_of(backend, layout_of([([3, 1], 0, 20)])).prompts
    assert (alone.others, alone.order) == (None, None)


def test_what_only_the_device_knows_attends_to_latents():
    lag = PositionLag(mx.array([0, 2]), np.array([0, 3], np.int32))
    requests = [([3, 1], 0, 20), ([5, 8], 4, 20)]
    slots = mx.array(layout_of(requests).slot_mapping_np)
    plan = plan_of(KERNELS, layout_of(requests, lag=lag, slot_mapping=slots))
    assert [prompt.first for prompt in plan.prompts.prompts] == [0]


def test_a_layer_without_such_heads_has_no_prompts():
    step, plan = layout_of(STEPS[0]), partial(SCATTER.plan, kind=KIND)
    assert planned(step, None, plan).prompts is None
    assert planned(step, HEADS._replace(key=512, value=512), plan).prompts is None


def test_long_prompts_end_command_buffers():
    pace = Pace()
    long = plan_of(SCATTER, layout_of([(list(range(1, 65)), 0, 1024)], pace=pace))
    assert long.pace is long.prompts.pace is pace
    short = plan_of(SCATTER, layout_of(STEPS[0], pace=pace))
    assert short.pace is None
    assert short.prompts.pace is None


@valuewise(
    elements=[mx.int8, mx.float32, mx.float16, mx.uint8],
    backend=[SCATTER, KERNELS],
)
def test_contexts_are_what_the_steps_have_written(backend, elements):
    codes = elements in (mx.uint8, mx.int8)
    dtype = mx.float32 if codes else elements
    kv_cache = backend.allocate(10, 16, KVShape(1, 576, 512, latent=True), elements)
    whole = backend.allocate(10, 16, KVShape(1, 576, 512, latent=True), elements)
    kept, rng = {}, np.random.default_rng(5)
    logger = Logger(metal_interpreter.metal_kernel)
    with kernel.using(logger.metal_kernel):
        for requests in STEPS:
            step = layout_of(requests)
            rows = rng.normal(size=(len(step.slot_mapping_np), 1, 576)).astype(np.float16)
            kept |= dict(zip(step.slot_mapping_np.tolist(), rows[:, 0], strict=True))
            queries = mx.array(rng.normal(size=(len(rows), 2, 576)).astype(np.float32), dtype)
            plan, latents = plan_of(backend, step), mx.array(rows, dtype)
            kv_cache.begin_step()
            kv_cache.write(plan, latents, latents)
            others = queries if plan.prompts is None else queries[plan.prompts.others]
            found = kv_cache.attend(plan, others, Scoring(0.1))
            read = [] if plan.prompts is None else kv_cache.contexts(plan, plan.prompts)
            contexts = [keys[0] for keys, _ in read]
            mx.eval(found, contexts)

            of_all = backend.plan(step, KIND)
            whole.begin_step()
            whole.write(of_all, latents, latents)
            wanted = whole.attend(of_all, queries, Scoring(0.1))
            if plan.prompts is not None:
                wanted = wanted[plan.prompts.others]
            close(found, wanted, 2e-3)
            for prompt, context in zip(
                plan.prompts.prompts if contexts else (), contexts, strict=True
            ):
                index = step.query_start_loc_np.tolist().index(prompt.first)
                positions = np.arange(prompt.context)
                slots = step.block_tables_np[index, positions // 16] * 16 + positions % 16
                written = np.stack([kept[slot] for slot in slots.tolist()])
                assert context.dtype == dtype
                close(context, written, 0.2 if codes else 0)
    assert prove_always(logger.log) == []


def close(found, wanted, atol):
    found, wanted = (
        np.array(each.astype(mx.float32)) if isinstance(each, mx.array) else each
        for each in (found, wanted)
    )
    np.testing.assert_allclose(found, wanted, atol=atol)
