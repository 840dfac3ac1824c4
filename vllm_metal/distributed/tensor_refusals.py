# SPDX-License-Identifier: Apache-2.0
"""Lists what is refused where several ranks share the heads of one model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_metal.settings.additional_config import AdditionalConfig
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
    speculation = config.speculative_config
    method = None if speculation is None else BY_NAME.get(speculation.method or "")
    images = model.multimodal_config
    option = f"--tensor-parallel-size {size}"
    return {
        f"{option} ({reason})": reason is not None,
        f"{option} with --runner pooling (heads are split for models that generate)": (
            pools(config)
        ),
        f"{option} with --enable-lora (adapters are not split by heads)": (
            config.lora_config is not None
        ),
        f"{option} with images (the tower is not split: --language-model-only serves the text)": (
            images is not None and not images.language_model_only
        ),
        f"{option} with a draft network (drafts by 'ngram' or 'suffix' are served)": (
            method is not None and method.has_network
        ),
        f"{option} with a prefix_cache_dir or --kv-transfer-config (a rank has its heads' K/V only)"
        "": (
            config.kv_transfer_config is not None
            or AdditionalConfig.of(config).prefix_cache_dir is not None
        ),
    }
