# SPDX-License-Identifier: Apache-2.0
"""Lists vLLM's environment variables that are rejected if they are set."""

from __future__ import annotations

from vllm import envs

#: Maps each name to its neutral value, as vLLM parses it, and to why others are rejected or what to
#: use instead.
REFUSED_VARIABLES: dict[str, tuple[bool | str | None, str]] = {
    "VLLM_BATCH_INVARIANT": (
        False,
        "a token's logits may differ by rounding with the requests beside it",
    ),
    "VLLM_CPU_KVCACHE_SPACE": (None, "it is for vLLM's CPU backend: use --kv-cache-memory-bytes"),
    "VLLM_FLOAT32_MATMUL_PRECISION": ("highest", "MLX multiplies matrices: use MLX_ENABLE_TF32"),
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": ("", "a model's router chooses its experts"),
    "VLLM_KV_CACHE_LAYOUT": ("LBNHC", "the pool has one layout: LBNHC"),
    "VLLM_USE_MODELSCOPE": (False, "weights come from Hugging Face, or a folder"),
    "VLLM_USE_RUST_FRONTEND": (
        False,
        "requests are checked in Python, before the engine gets them",
    ),
}


def refused_variables() -> dict[str, bool]:
    """Maps each unsupported variable, named as in the start error, to whether it is set."""
    return {
        f"{name} ({why})": envs.is_set(name) and envs.environment_variables[name]() != off
        for name, (off, why) in REFUSED_VARIABLES.items()
    }
