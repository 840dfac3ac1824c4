# SPDX-License-Identifier: Apache-2.0
"""What is refused where one model is computed by several ranks, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_metal.kv_transfer.config import is_asked_for
from vllm_metal.models.staged_families import STAGED
from vllm_metal.settings.runner import pools

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_OPTION = "--pipeline-parallel-size"


def refusals(config: VllmConfig) -> dict[str, bool]:
    """Settings by what an error says of them, and whether each was asked for.

    Args:
        config: vLLM's.
    """
    parallel, model = config.parallel_config, config.model_config
    if parallel.pipeline_parallel_size == 1 or model is None:
        return {}
    with_stages = f"with {_OPTION}"
    multimodal = model.multimodal_config
    return {
        f"{_OPTION} of model_type {model.hf_config.model_type!r} (its layers were not shown to "
        "compute the same on several ranks)": module_of(model.hf_config.model_type) not in STAGED,
        f"{_OPTION} with --data-parallel-size": parallel.data_parallel_size > 1,
        f"--speculative-config {with_stages}": config.speculative_config is not None,
        f"--enable-lora {with_stages}": config.lora_config is not None,
        f"--runner pooling {with_stages}": pools(config),
        f"images {with_stages} (--language-model-only serves the text)": (
            multimodal is not None and not multimodal.language_model_only
        ),
        f"--kv-transfer-config, or a prefix cache on disk, {with_stages} (K/V stay in the pool)": (
            is_asked_for(config)
        ),
        f"--logits-processors {with_stages}": bool(model.logits_processors),
        f"--enable-sleep-mode {with_stages}": model.enable_sleep_mode,
    }


def module_of(model_type: str) -> str:
    """mlx-lm's module for a model_type of config.json."""
    from mlx_lm.utils import MODEL_REMAPPING

    return str(MODEL_REMAPPING.get(model_type, model_type))
