# SPDX-License-Identifier: Apache-2.0
"""Text models that are published as a part of a multimodal one."""

from __future__ import annotations

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")

#: By architecture of a checkpoint, the one of vLLM's whose text model has the same layers.
_TEXT_MODELS = {
    "Qwen3_5ForConditionalGeneration": "Qwen3NextForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3NextForCausalLM",
    "Qwen3_5MTP": "Qwen3NextMTP",
    "Qwen3_5MoeMTP": "Qwen3NextMTP",
    "Gemma3nForConditionalGeneration": "Gemma3nForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "KimiVLForConditionalGeneration": "DeepseekV3ForCausalLM",
    "KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
    "KimiK3ForConditionalGeneration": "KimiLinearForCausalLM",
}


def take_text_models() -> None:
    """Has vLLM take such checkpoints for text models, whose layers mlx-lm reads.

    vLLM asks its own class of an architecture what the model can do. Those of multimodal ones need
    packages that serving text does not, and would have images taken that nobody looks at.
    """
    from vllm.model_executor.models import ModelRegistry

    models = ModelRegistry.models
    for architecture, text_model in _TEXT_MODELS.items():
        if text_model in models:
            models[architecture] = models[text_model]
