# SPDX-License-Identifier: Apache-2.0
"""YaRN of mlx-lm's modules has the frequencies and the factor of transformers'."""

import importlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import rope_utils
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_metal.patches.mlx_patches import registry

DIMS, THETA = 16, 10000.0
YARN = {"factor": 8.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0}


def of_transformers(rope_type, scaling, seq_len=None):
    """Returns [DIMS / 2] wavelengths / 2 pi, and transformers' attention factor."""
    config = LlamaConfig(
        hidden_size=4 * DIMS,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_type": rope_type, "rope_theta": THETA, **scaling},
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu", seq_len=seq_len)
    return 1 / inverse.numpy(), factor


def made(rope_type, scaling):
    registry.install()
    return rope_utils.initialize_rope(DIMS, THETA, False, {"type": rope_type, **scaling}, 512)


@pytest.mark.parametrize(
    "changes",
    [{}, {"truncate": False}, {"attention_factor": 1.7}, {"truncate": False, "factor": 3.0}],
)
def test_yarn(changes):
    scaling = YARN | changes
    rope, (freqs, factor) = made("yarn", scaling), of_transformers("yarn", scaling)
    np.testing.assert_allclose(np.array(rope._freqs), freqs, rtol=1e-5)
    assert rope.mscale == pytest.approx(factor)


@pytest.mark.parametrize("changes", [{"truncate": False}, {"attention_factor": 1.7}])
def test_mlx_lm_reads_less_of_yarn(changes):
    """Delete the patch once this fails."""
    registry.install()
    original = rope_utils.initialize_rope.__wrapped__
    rope = original(DIMS, THETA, False, {"type": "yarn", **YARN, **changes}, 512)
    freqs, factor = of_transformers("yarn", YARN | changes)
    assert not np.allclose(np.array(rope._freqs), freqs, rtol=1e-3) or rope.mscale != factor


def test_modules_that_imported_the_function_have_the_patched_one():
    module = importlib.import_module("mlx_lm.models.llama")
    registry.install()
    assert module.initialize_rope is rope_utils.initialize_rope
    rope = module.initialize_rope(DIMS, THETA, True, None)
    assert isinstance(rope, nn.RoPE) and isinstance(rope(mx.zeros((1, 1, 2, DIMS))), mx.array)
