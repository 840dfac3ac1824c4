# SPDX-License-Identifier: Apache-2.0
"""Defaults of the engine's arguments."""

import json

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm_patches.unpatched import MODEL

MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 96,
}


@pytest.mark.parametrize(
    ("config", "asked", "length", "original"),
    [
        (MODEL, None, 512, -1),
        (MODEL, -1, 512, -1),
        (MODEL, 256, 256, 256),
        (MAMBA, None, 2048, -1),  # it names no length, of which vLLM makes its own default
    ],
)
def test_a_length_that_nobody_gave_is_what_fits(config, asked, length, original, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=asked)
    made = args.create_engine_config().model_config
    assert (made.max_model_len, made.original_max_model_len) == (length, original)
    assert args.max_model_len == asked
