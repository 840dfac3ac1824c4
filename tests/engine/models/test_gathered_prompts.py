# SPDX-License-Identifier: Apache-2.0
"""Prompts by MLX's attention over gathered contexts: mlx-lm's own results, with windows and sinks.

Chunks of any length, beside each other and beside requests that decode or verify drafts.
"""

import metal_interpreter
import mlx.core as mx
import numpy as np
import pytest
from engine.models.test_executor import COMMON, build
from engine.models.test_latent_prompts import Served
from mlx_lm.models.cache import make_prompt_cache

from metal_kernels import kernel
from metal_kernels.paged_attention import prompts
from vllm_metal.engine.attention.layers import attention_layers
from vllm_metal.engine.kv_cache.gathered import ByMLX
from vllm_metal.engine.kv_cache.kernels import KernelBackend

pytestmark = pytest.mark.usefixtures("unfused")

#: Rows of each request in each step.
STEPS = ({0: 70, 1: 3}, {1: 64}, {0: 1, 1: 30}, {0: 65, 1: 1}, {0: 4})
GATHERED = [(70, 70), (64, 67), (65, 136)]  # of them, rows and context


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        ("gpt_oss", False),
        pytest.param("gpt_oss", True, marks=pytest.mark.more),
        pytest.param("gemma3_text", False, marks=pytest.mark.slow),
        pytest.param("gemma3_text", True, marks=pytest.mark.slow),
    ],
)
def test_chunks_equal_the_dense_forward(name, turns, monkeypatch):
    monkeypatch.setitem(COMMON, "head_dim", 64)
    monkeypatch.setitem(COMMON, "num_hidden_layers", 2)
    if turns:
        monkeypatch.setattr(prompts, "GATHERED_AT_ONCE", 1)
    planned, plan = [], prompts.plan

    def noting(starts, lens, *args, **options):
        planned.extend(zip(np.diff(starts).tolist(), lens.tolist(), strict=True))
        return plan(starts, lens, *args, **options)

    monkeypatch.setattr(prompts, "plan", noting)
    model, rng = build(name), np.random.default_rng(8)
    texts = [rng.integers(0, 128, length).tolist() for length in (140, 98)]
    dense = [np.array(model(mx.array([text]), cache=make_prompt_cache(model))[0]) for text in texts]
    kinds = dict.fromkeys(layer.kind for layer in attention_layers(model, name))
    by_mlx = dict.fromkeys(kinds, ByMLX(prompts={1: 64}))
    with kernel.using(metal_interpreter.metal_kernel):
        served = Served(model, name, texts, KernelBackend(by_mlx=by_mlx))
        done, found = [0, 0], [[], []]
        for counts in STEPS:
            for index, logits in served.step(done, counts).items():
                found[index].append(logits)
                done[index] += counts[index]
    for parts, wanted in zip(found, dense, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), wanted, atol=2e-4, rtol=2e-4)
        assert np.array_equal(np.concatenate(parts).argmax(-1), wanted.argmax(-1))
    assert sorted(planned) == sorted(GATHERED * len(kinds))
