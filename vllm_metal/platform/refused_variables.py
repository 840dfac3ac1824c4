# SPDX-License-Identifier: Apache-2.0
"""Lists variables of vLLM's environment that are refused where they are set: a row each."""

from __future__ import annotations

from dataclasses import dataclass

from vllm import envs


@dataclass(frozen=True)
class RefusedVariable:
    """A variable that cannot be honoured.

    off: its value, as vLLM reads it, where it asks for nothing. why: the reason, or what to do
    instead.
    """

    name: str
    off: bool | float | str | None
    why: str


REFUSED_VARIABLES = (
    RefusedVariable(
        "VLLM_BATCH_INVARIANT",
        False,
        "a token's logits may differ by rounding with the requests beside it",
    ),
    RefusedVariable(
        "VLLM_CPU_KVCACHE_SPACE", None, "it is for vLLM's CPU backend: --kv-cache-memory-bytes"
    ),
    RefusedVariable(
        "VLLM_FLOAT32_MATMUL_PRECISION", "highest", "MLX multiplies matrices: MLX_ENABLE_TF32"
    ),
    RefusedVariable(
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "", "a model's router chooses its experts"
    ),
    RefusedVariable("VLLM_KV_CACHE_LAYOUT", "LBNHC", "the pool has one layout: LBNHC"),
    RefusedVariable("VLLM_USE_MODELSCOPE", False, "weights come from Hugging Face, or a folder"),
    RefusedVariable(
        "VLLM_USE_RUST_FRONTEND",
        False,
        "requests are checked in Python, before the engine gets them",
    ),
)


def refused_variables() -> dict[str, bool]:
    """Variables by what an error says of them, and whether each is set."""
    return {f"{row.name} ({row.why})": _asked(row) for row in REFUSED_VARIABLES}


def _asked(row: RefusedVariable) -> bool:
    return bool(envs.is_set(row.name) and envs.environment_variables[row.name]() != row.off)
