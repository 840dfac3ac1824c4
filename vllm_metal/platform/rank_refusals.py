# SPDX-License-Identifier: Apache-2.0
"""Rejects settings that conflict with pipeline or tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_metal.engine.models import staged_families
from vllm_metal.engine.spec_decode.registry import BY_NAME
from vllm_metal.kv_transfer.config import is_enabled
from vllm_metal.settings.runner import pools

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

_PIPELINE, _TENSOR = "--pipeline-parallel-size", "--tensor-parallel-size"


def refusals(config: VllmConfig) -> dict[str, bool]:
    """Maps each setting, in the words of the start error, to whether it must be rejected."""
    parallel, model = config.parallel_config, config.model_config
    sizes = {
        _PIPELINE: parallel.pipeline_parallel_size,
        _TENSOR: parallel.tensor_parallel_size,
    }
    options = [option for option, size in sizes.items() if size > 1]
    if not options or model is None:
        return {}
    refused = _common_refusals(config, model, " and ".join(options))
    if _PIPELINE in options:
        refused |= _pipeline_refusals(config, model)
    if _TENSOR in options:
        refused |= _tensor_refusals(config, model)
    return refused


def _common_refusals(config: VllmConfig, model: ModelConfig, options: str) -> dict[str, bool]:
    parallel, multimodal = config.parallel_config, model.multimodal_config
    speculation, with_options = config.speculative_config, f"with {options}"
    method = None if speculation is None else BY_NAME.get(speculation.method or "")
    return {
        f"--data-parallel-size {with_options}": parallel.data_parallel_size > 1,
        f"--enable-lora {with_options} (adapters are not sharded)": config.lora_config is not None,
        f"--runner pooling {with_options} (only generative models are sharded)": pools(config),
        f"images {with_options} (--language-model-only serves the text)": (
            multimodal is not None and not multimodal.language_model_only
        ),
        f"--kv-transfer-config, or a prefix cache on disk, {with_options} (each rank has "
        "only a part of the K/V)": is_enabled(config),
        f"--enable-sleep-mode {with_options}": model.enable_sleep_mode,
        f"--speculative-config {with_options} and a draft network (n-gram and suffix drafts "
        "are supported)": method is not None and method.has_network,
    }


def _pipeline_refusals(config: VllmConfig, model: ModelConfig) -> dict[str, bool]:
    model_type = model.hf_config.model_type
    reason = staged_families.refusal(model_type)
    size, layers = (
        config.parallel_config.pipeline_parallel_size,
        model.get_total_num_hidden_layers(),
    )
    return {
        f"{_PIPELINE} {size} (more ranks than the model has layers, {layers})": size > layers,
        f"{_PIPELINE} of {reason}": reason is not None,
        # Ranks that do not sample are at other steps when they learn which drafts were accepted.
        f"--speculative-config with {_PIPELINE} (for models with recurrent layers)": (
            config.speculative_config is not None and staged_families.keeps_states(model_type)
        ),
        f"--logits-processors with {_PIPELINE}": bool(model.logits_processors),
    }


def _tensor_refusals(config: VllmConfig, model: ModelConfig) -> dict[str, bool]:
    from vllm_metal.engine.distributed import sharding  # loads mlx-lm, which other checks do not

    reason = sharding.refusal(model.hf_config.to_dict())
    return {
        f"{_TENSOR} ({reason})": reason is not None,
        f"--distributed-executor-backend ray with {_TENSOR} (leave it out)": (
            config.parallel_config.use_ray
        ),
    }
