# SPDX-License-Identifier: Apache-2.0
"""Lists what is refused where several ranks share the heads of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_metal.kv_transfer.config import is_asked_for
from vllm_metal.settings.runner import pools
from vllm_metal.spec_decode.registry import BY_NAME

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refusals(config: VllmConfig) -> dict[str, bool]:
    """Settings by what an error says of them, and whether each was asked for."""
    size, model = config.parallel_config.tensor_parallel_size, config.model_config
    if size == 1 or model is None:
        return {}
    from vllm_metal.distributed import sharding  # mlx-lm, which other checks have no use for

    reason = sharding.refusal(model.hf_config.to_dict())
    speculation, images = config.speculative_config, model.multimodal_config
    method = None if speculation is None else BY_NAME.get(speculation.method or "")
    refused = {
        f"({reason})": reason is not None,
        "with --runner pooling (heads are split for models that generate)": pools(config),
        "with --enable-lora (adapters are not split by heads)": config.lora_config is not None,
        "with images (the tower is not split: --language-model-only serves the text)": (
            images is not None and not images.language_model_only
        ),
        "with a draft network (drafts that are looked up in the text are served)": (
            method is not None and method.has_network
        ),
        "with --kv-transfer-config, or a prefix cache on disk (a rank has the K/V of its heads "
        "only)": is_asked_for(config),
        "with --enable-sleep-mode": model.enable_sleep_mode,
        "with --data-parallel-size": config.parallel_config.data_parallel_size > 1,
        "with --distributed-executor-backend ray (leave it out)": config.parallel_config.use_ray,
    }
    return {f"--tensor-parallel-size {size} {why}": asked for why, asked in refused.items()}
