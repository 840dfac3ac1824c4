# SPDX-License-Identifier: Apache-2.0
"""MTP layers of models with latent attention: text is mlx-lm's, with drafts and hits."""

import json

import pytest
from engine.models.cases import cases
from engine.models.test_mtp_weights import write
from engine.spec_decode.heads import serve_and_check

ARCHITECTURES = {"deepseek_v3": "DeepseekV3ForCausalLM", "glm4_moe_lite": "Glm4MoeLiteForCausalLM"}


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("model_type", cases(ARCHITECTURES, more=["deepseek_v3"]))
def test_served(tmp_path, monkeypatch, model_type):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    write(tmp_path, model_type, fp8=False)
    path = tmp_path / "config.json"
    more = {
        "architectures": [ARCHITECTURES[model_type]],
        "num_nextn_predict_layers": 1,
        "max_position_embeddings": 512,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "moe_layer_freq": 1,
        "rms_norm_eps": 1e-6,
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    serve_and_check(tmp_path, {"method": "mtp", "num_speculative_tokens": 3})
