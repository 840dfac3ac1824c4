# SPDX-License-Identifier: Apache-2.0
"""Architecture names of config.json that are served in addition to vLLM's text models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_metal.settings.mlx_vlm_models import TEXT_ARCHITECTURES

#: Multimodal models whose text part (or its MTP layers) can be served by itself.
TEXT_PARTS = (
    "DeepseekV41ForCausalLM",
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
    *TEXT_ARCHITECTURES,
)
#: Models served with images if mlx-vlm is installed.
WITH_IMAGES = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "InklingForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
#: Models for which vLLM also accepts video and audio; this plugin has a tower for images only.
IMAGES_ONLY = frozenset({"Gemma4ForConditionalGeneration"})
#: vLLM's generic classes for text models that only transformers implements.
BY_TRANSFORMERS = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
#: Maps method (also the `model_type`) to architecture of the draft heads that vLLM 0.33 dropped.
DROPPED_HEADS = {
    "medusa": "MedusaModel",
    "mlp_speculator": "MLPSpeculatorPreTrainedModel",
}
#: MTP layers that mlx-vlm has split from a checkpoint into a folder: maps its `model_type` to the
#: layer's architecture, as vLLM names it, by the `model_type` of its `text_config`, the target's.
SPLIT_MTP = {
    "glm4_moe_lite_mtp": {"glm4_moe_lite": "Glm4MoeLiteMTPModel"},
    "nemotron_h_mtp": {"nemotron_h": "NemotronHMTPModel"},
    "qwen3_5_mtp": {
        "qwen3_5": "Qwen3_5MTP",
        "qwen3_5_text": "Qwen3_5MTP",
        "qwen3_5_moe": "Qwen3_5MoeMTP",
        "qwen3_5_moe_text": "Qwen3_5MoeMTP",
        "qwen3_next": "Qwen3NextMTP",
    },
}
#: `model_type` of Gemma 4's assistants, which vLLM counts among MTP layers, and of their targets.
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
ASSISTED = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
#: Keys of config.json with the number of MTP layers.
MTP_DEPTHS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
#: Models that vLLM lists as text models although they take images or audio; vLLM's own classes
#: describe them.
MULTIMODAL = frozenset(
    {
        "HCXVisionV2ForCausalLM",
        "MuseGlimmerForCausalLM",
        "Emu3ForConditionalGeneration",
        "HunYuanVLForConditionalGeneration",
        "VibeVoiceAsrForConditionalGeneration",
    }
)


def mtp_depth(text: Mapping[str, Any]) -> int:
    """Returns the number of MTP layers that a text model's config.json states; 0: none."""
    return next((int(text[key]) for key in MTP_DEPTHS if text.get(key)), 0)
