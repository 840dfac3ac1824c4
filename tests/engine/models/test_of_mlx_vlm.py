# SPDX-License-Identifier: Apache-2.0
"""Text models that only mlx-vlm has a module for: paged equals mlx-vlm's own dense forward."""

import mlx.core as mx
import numpy as np
import pytest
from engine.models import doubles, of_mlx_vlm
from engine.models.cases import cases
from engine.models.recurrent import make_model
from engine.models.test_executor import chunk_by_chunk, of_states
from engine.models.test_plain import TOLERANCE, prompts_of
from mlx_lm.models.cache import make_prompt_cache

from vllm_metal.settings.mlx_vlm_models import MLX_VLM_MODELS

pytestmark = pytest.mark.usefixtures("unfused")
QUICK = ("cohere2_moe",)


def test_every_row_has_a_small_model():
    assert set(of_mlx_vlm.FAMILIES) == set(MLX_VLM_MODELS)


@pytest.mark.parametrize("name", cases(of_mlx_vlm.FAMILIES, QUICK))
def test_chunks_of_a_mixed_batch_equal_the_dense_forward(name, monkeypatch):
    doubles.install(monkeypatch)
    model, prompts = make_model(of_mlx_vlm.FAMILIES[name], seed=7, drawn=True), prompts_of()
    expected = [
        np.array(model(mx.array([p]), cache=make_prompt_cache(model))[0].astype(mx.float32))
        for p in prompts
    ]
    assert len(set(np.concatenate(expected).argmax(-1).tolist())) > 8, "texts do not vary"
    blocks = np.random.default_rng(5).permutation(np.arange(1, 40))
    parts = chunk_by_chunk(model, name, prompts, blocks, of_states)
    found = [np.concatenate([np.array(part, np.float32) for part in one]) for one in parts]
    worst = max(np.abs(one - other).max() for one, other in zip(found, expected, strict=True))
    assert worst <= TOLERANCE
