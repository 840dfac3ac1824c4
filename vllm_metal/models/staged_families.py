# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's modules of which stages, one after another, were shown to compute what the whole does.

tests/models/test_stage.py cuts a small model of each module at every layer, and compares the logits
with those of mlx-lm's own dense forward.
"""

#: Whose layers keep states, all or some.
STAGED_STATES = frozenset(
    (
        "falcon_h1",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "mamba2",
        "olmo_hybrid",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "recurrent_gemma",
    )
)
STAGED = STAGED_STATES | frozenset(
    (
        "bailing_moe",
        "cohere2",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "gpt_oss",
        "granite",
        "llama",
        "minimax",
        "mistral3",
        "mixtral",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    )
)
