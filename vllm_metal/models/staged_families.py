# SPDX-License-Identifier: Apache-2.0
"""mlx-lm's modules of which stages, one after another, were shown to compute what the whole does.

tests/models/test_stage.py cuts a small model of each module at every layer, and compares the logits
with those of mlx-lm's own dense forward. Modules whose layers keep states pass it too, but are not
here: vLLM's scheduler is not told in another process that their blocks end where states are kept.
"""

STAGED = frozenset(
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


def refusal(model_type: str) -> str | None:
    """Why layers are not shared out, from the model_type of a config.json; None: they are."""
    from mlx_lm.utils import MODEL_REMAPPING

    if str(MODEL_REMAPPING.get(model_type, model_type)) in STAGED:
        return None
    return (
        f"model_type {model_type!r} (its layers were not shown to compute the same on several "
        "ranks)"
    )
