# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's modules that are not compared with a transformers class."""

#: Modules with a class in transformers, and why there is no small model of them here.
LEFT_OUT: dict[str, str] = {
    "gemma3": "the text model is gemma3_text; vLLM takes the multimodal one, which is refused",
    "gemma4": "its text model is gemma4_text, which it calls",
    "kimi_k25": "its text model is deepseek_v3, which it calls",
    "llama4": "multimodal, refused; its text model is llama4_text",
    "mistral3": "multimodal, refused; its text models are llama and ministral3",
    "muse_glimmer": "multimodal, refused",
    "pixtral": "multimodal, refused; its text model is llama",
    "qwen2_vl": "multimodal, refused",
    "qwen3_vl": "multimodal, refused",
    "qwen3_vl_moe": "multimodal, refused",
    "step3p5": "transformers has its configuration and no class for generation",
}
#: The same for modules whose class exists from transformers 5.20 on.
SINCE_5_20: dict[str, str] = {
    "bailing_hybrid": "not compared yet, and nor is it with the class of another package",
    "muse_spark": "not compared yet; the class is of the multimodal model",
}
