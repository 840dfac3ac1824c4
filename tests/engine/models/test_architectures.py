# SPDX-License-Identifier: Apache-2.0
"""Architectures that vLLM accepts, from its list or transformers."""

import pytest
from engine.models.published import FAMILIES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as DECODERS

from vllm_metal.engine.models import architectures
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import registry


@pytest.mark.parametrize("model_type", sorted({each.model_type for each in FAMILIES.values()}))
def test_families_that_are_compared_with_transformers_are_taken(model_type):
    if model_type in DECODERS:
        content = {"model_type": model_type, "architectures": [DECODERS[model_type]]}
        architectures.check(content)
        with pytest.raises(ModelLoadError, match=r"\['NobodysForCausalLM'\] of config.json"):
            architectures.check(content | {"architectures": ["NobodysForCausalLM"]})


def test_models_of_mlx_vlm_need_it_and_the_error_has_the_command(monkeypatch):
    content = {"model_type": "cohere2_moe", "architectures": ["Cohere2MoeForCausalLM"]}
    architectures.check(content)
    monkeypatch.setattr(registry, "is_installed", lambda: False)
    with pytest.raises(ModelLoadError, match=r"'cohere2_moe'.*pip install.*--no-deps.*mlx-vlm"):
        architectures.check(content)
    architectures.check({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
