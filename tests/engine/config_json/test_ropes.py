# SPDX-License-Identifier: Apache-2.0
"""LongRoPE of mlx-lm's modules has the frequencies and the factor of transformers'."""

import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import rope_utils
from patches.mlx_patches.families.test_positions import DIMS, THETA, made, of_transformers

from vllm_metal.engine.config_json.ropes import fit_context
from vllm_metal.patches.mlx_patches import registry

LONG = {
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + index / 8 for index in range(DIMS // 2)],
    "long_factor": [3.0 + index for index in range(DIMS // 2)],
}


class Model(nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.layers = [nn.Linear(1, 1)]
        self.rope = rope


@pytest.mark.parametrize(("longest", "read_as"), [(64, 64), (65, 65)])
def test_longrope_by_the_longest_text(longest, read_as):
    rope = made("longrope", LONG)
    model = Model(rope)
    fit_context(model, longest)
    freqs, factor = of_transformers("longrope", LONG, seq_len=read_as)
    np.testing.assert_allclose(np.array(rope._freqs), freqs, rtol=1e-5)
    assert rope._scale == pytest.approx(factor)
    assert {name for name, _ in model.named_modules()} == {"layers.0", "rope", ""}


def test_short_texts_have_their_own_scale_where_the_file_says_so():
    registry.install()
    given = {"short_mscale": 1.3, "long_mscale": 1.4, "max_position_embeddings": 512}
    rope = rope_utils.SuScaledRoPE(DIMS, THETA, **LONG, **given)
    assert rope._scale == 1.4
    fit_context(Model(rope), 64)
    assert rope._scale == 1.3
