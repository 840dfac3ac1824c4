# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's modules of which stages, one after another, were shown to compute what the whole does.

tests/models/test_stage.py cuts a small model of each module at every layer, and compares the logits
with those of mlx-lm's own dense forward.
"""

#: Whose layers keep states, all or some.
STAGED_STATES = frozenset(
    (
        "falcon_h1",
        "jamba",
        "lfm2",
        "mamba2",
        "qwen3_5",
        "qwen3_next",
        "recurrent_gemma",
    )
)
STAGED = STAGED_STATES | frozenset(
    (
        "deepseek_v2",
        "deepseek_v3",
        "gemma2",
        "gemma3_text",
        "glm4_moe",
        "gpt_oss",
        "llama",
        "mistral3",
        "mixtral",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
    )
)
