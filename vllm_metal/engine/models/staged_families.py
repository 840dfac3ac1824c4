# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's modules that were tested to compute the same in pipeline stages as in one piece.

tests/engine/models/test_stage.py splits a small model of each module at every layer, and compares
the logits with those of mlx-lm's own dense forward.
"""

#: Modules with recurrent state in all or some layers.
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


def refusal(model_type: str) -> str | None:
    """Returns why a config.json's model_type does not run in stages, or None if it does."""
    if _module(model_type) in STAGED:
        return None
    return (
        f"model_type {model_type!r} (its layers are not verified to compute the same on several "
        "ranks)"
    )


def keeps_states(model_type: str) -> bool:
    """Returns whether a model_type that runs in pipeline stages has recurrent layers."""
    return _module(model_type) in STAGED_STATES


def _module(model_type: str) -> str:
    from mlx_lm.utils import MODEL_REMAPPING

    return str(MODEL_REMAPPING.get(model_type, model_type))
