# SPDX-License-Identifier: Apache-2.0
"""Names of models in `architectures` of config.json that are served beside vLLM's text models."""

from __future__ import annotations

#: Text models that are published as a part of a multimodal one, and MTP layers of such, by name.
TEXT_PARTS = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "MiniMaxM3SparseForConditionalGeneration",
)
#: Models whose images are served, where mlx-vlm is installed.
WITH_IMAGES = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
#: Those of which vLLM takes videos and sound, too; with a tower here for images alone.
IMAGES_ALONE = frozenset({"Gemma4ForConditionalGeneration"})
#: vLLM's stand-ins for text models that transformers has and its own list has not.
BY_TRANSFORMERS = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
#: Draft heads that vLLM dropped in 0.33, by the method, which is also their `model_type`.
DROPPED_HEADS = {
    "medusa": "MedusaModel",
    "mlp_speculator": "MLPSpeculatorPreTrainedModel",
}
#: What vLLM lists among text models although they take images or sound: its own classes answer.
MULTIMODAL = frozenset(
    {
        "HCXVisionV2ForCausalLM",
        "InklingForConditionalGeneration",
        "MuseGlimmerForCausalLM",
        "Emu3ForConditionalGeneration",
        "HunYuanVLForConditionalGeneration",
        "VibeVoiceAsrForConditionalGeneration",
    }
)
