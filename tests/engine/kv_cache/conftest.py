# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration of an engine, for its pool planner."""

import json

import pytest
from vllm.engine.arg_utils import EngineArgs


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 96,
                "max_position_embeddings": 512,
            }
        )
    )
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=256)
    config = args.create_engine_config()
    config.cache_config.kv_cache_layout = "LBNHC"  # as the worker sets it
    return config
