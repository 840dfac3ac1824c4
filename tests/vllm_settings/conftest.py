# SPDX-License-Identifier: Apache-2.0
"""Provides folders of models with a configuration and no weights."""

import json

import pytest
from engine.vision.checkpoints import FAMILIES
from patches.vllm_patches import doubles


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("model")
    (made / "config.json").write_text(json.dumps(doubles.MODEL))
    return str(made)


@pytest.fixture(scope="session")
def reader(tmp_path_factory):
    """A model that reads images."""
    made = tmp_path_factory.mktemp("reader")
    family = FAMILIES["qwen3_vl"]
    config = family.config({token: index for index, token in enumerate(family.special)})
    config |= {"model_type": "qwen3_vl", "architectures": [family.architecture]}
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory):
    """Another folder, with the configuration also in Mistral's format."""
    made = tmp_path_factory.mktemp("elsewhere")
    (made / "config.json").write_text(json.dumps(doubles.MODEL))
    params = {"dim": 64, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4}
    params |= {"head_dim": 16, "vocab_size": 96, "norm_eps": 1e-5, "max_seq_len": 512}
    (made / "params.json").write_text(json.dumps(params | {"rope_theta": 10000.0}))
    return str(made)
