# SPDX-License-Identifier: Apache-2.0
"""Rejects unsupported settings before a model is loaded, all in one error.

Functions of this module map settings, in the words of the error, to whether they are set.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_metal.device import mlx_device
from vllm_metal.engine.distributed import groups
from vllm_metal.engine.kv_cache import formats
from vllm_metal.engine.pooling import refusals as pooling
from vllm_metal.engine.pooling.encoders import refusals as encoders
from vllm_metal.engine.pooling.encoders import served
from vllm_metal.engine.spec_decode import block_config, checkpoint
from vllm_metal.engine.spec_decode.registry import (
    BY_NAME,
    SPECULATIVE_METHODS,
    architectures_of,
    drafts_for_others,
)
from vllm_metal.kv_transfer.config import CONNECTOR, CONNECTOR_MODULE, is_enabled
from vllm_metal.platform import rank_refusals
from vllm_metal.platform.image_refusals import image_refusals
from vllm_metal.platform.refused_options import refused_options
from vllm_metal.platform.refused_variables import refused_variables
from vllm_metal.platform.replica_refusals import replica_refusals
from vllm_metal.serving import start
from vllm_metal.serving.idle import idle_period
from vllm_metal.settings import cache_dtypes, envs, whole_prompts
from vllm_metal.settings.additional_config import AdditionalConfig
from vllm_metal.settings.runner import pools

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refuse_unsupported(config: VllmConfig) -> None:
    """Raises ValueError with all settings that cannot be honored, and alternatives."""
    given = AdditionalConfig.of(config)
    device = envs.requested_device() or "metal"
    refusals = (
        _engine_refusals(config)
        | refused_options(config)
        | refused_variables()
        | replica_refusals(config)
        | _transfer_refusals(config)
        | _lora_refusals(config)
        | _model_refusals(config)
        | image_refusals(config)
        | _speculation_refusals(config)
        | pooling.refusals(config, served.of_config(config) is not None, served.ARCHITECTURES)
        | _serving_refusals(config)
        | rank_refusals.refusals(config)
        | idle_period.refusals(config)
        | encoders.refusals(config)
        | whole_prompts.refusals(config)
    )
    refusals["--additional-config wire_memory (it needs a Mac's GPU, and macOS 15 or newer)"] = (
        bool(given.wire_memory) and not mlx_device.can_wire(device)
    )
    method = BY_NAME.get(getattr(config.speculative_config, "method", None) or "")
    refusals[
        "--additional-config prompt_lookup (it needs a draft network to copy beside: choose "
        "another --speculative-config method, or leave it out; ngram drafts copies alone)"
    ] = bool(given.prompt_lookup) and not (
        drafts_for_others(config) or (method is not None and method.has_network)
    )
    by_mlx = envs.kernels() == "mlx" or (envs.kernels() == "auto" and device == "cpu")
    refusals[
        "--additional-config fixed_splits (it needs this plugin's kernels: a Mac's GPU, and "
        "VLLM_METAL_KERNELS other than mlx)"
    ] = given.fixed_splits is not None and by_mlx
    refused = [setting for setting, is_set in refusals.items() if is_set]
    if refused:
        raise ValueError("vllm-metal does not support " + ", ".join(refused))


def _engine_refusals(config: VllmConfig) -> dict[str, bool]:
    parallel = config.parallel_config
    executor = parallel.distributed_executor_backend
    return {
        "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
        "--ec-transfer-config": config.ec_transfer_config is not None,
        "--kv-cache-dtype-skip-layers": bool(config.cache_config.kv_cache_dtype_skip_layers),
        "--nnodes without --pipeline-parallel-size": (
            parallel.nnodes > 1 and not groups.is_distributed(parallel)
        ),
        f"--distributed-executor-backend {executor} (there is one device: leave it out)": (
            executor == "external_launcher"
            or (executor in ("mp", "ray") and not groups.is_distributed(parallel))
        ),
        "--attention-config use_non_causal": config.attention_config.use_non_causal,
    }


def _lora_refusals(config: VllmConfig) -> dict[str, bool]:
    lora, model = config.lora_config, config.model_config
    if lora is None:
        return {}
    return {
        "--enable-lora with --runner pooling (adapters are for models that generate)": (
            pools(config)
        ),
        f"--lora-dtype {lora.lora_dtype} (adapters use the model's dtype: leave it out)": (
            model is not None and lora.lora_dtype not in ("auto", model.dtype)
        ),
        "--fully-sharded-loras": lora.fully_sharded_loras,
        "--default-mm-loras": bool(lora.default_mm_loras),
        "--enable-tower-connector-lora": lora.enable_tower_connector_lora,
        "--specialize-active-lora": lora.specialize_active_lora,
        "--enable-mixed-moe-lora-format (both formats are read without it)": (
            lora.enable_mixed_moe_lora_format
        ),
        "--enable-moe-shared-loras": lora.enable_moe_shared_loras,
        "--max-lora-cls-labels": lora.max_lora_cls_labels is not None,
    }


def _transfer_refusals(config: VllmConfig) -> dict[str, bool]:
    instead = (
        f"use {CONNECTOR!r}, or --additional-config prefix_cache_dir for a prefix cache on disk"
    )
    refused = {
        "--kv-offloading-size (memory is unified: there is no other side to offload to; "
        "--additional-config prefix_cache_dir keeps K/V on disk)": (
            config.cache_config.kv_offloading_size is not None
        ),
        "--kv-transfer-config or a prefix_cache_dir with --runner pooling (K/V stay in the pool)": (
            pools(config) and is_enabled(config)
        ),
    }
    transfer = config.kv_transfer_config
    if transfer is None:
        return refused
    option = "--kv-transfer-config "
    connector, module = transfer.kv_connector, transfer.kv_connector_module_path
    reason = "vLLM's connectors need CUDA, or packages that do not exist for a Mac"
    if connector == "MultiConnector":
        reason = "it combines connectors, and all but one are refused"
    if connector is None:
        return refused | {f"{option}without kv_connector ({instead})": True}
    if connector != CONNECTOR:
        return refused | {f"{option}kv_connector {connector!r} ({reason}: {instead})": True}
    return refused | {
        f"{option}kv_connector_module_path {module!r} (leave it out)": (
            module not in (None, CONNECTOR_MODULE)
        ),
        f"{option}enable_permute_local_kv": transfer.enable_permute_local_kv,
    }


def _model_refusals(config: VllmConfig) -> dict[str, bool]:
    model, cache = config.model_config, config.cache_config
    if model is None:
        return {}
    assert isinstance(model.dtype, torch.dtype)  # vLLM has resolved "auto" and names
    choices = f"choose one of {', '.join(formats.OFFERED)}, or {model.dtype} as the model is"
    return {
        f"--kv-cache-dtype {cache.cache_dtype} ({choices})": not formats.offered(
            cache.cache_dtype, model.dtype
        ),
        f"--mamba-block-size {cache.mamba_block_size} (states lie in blocks of --block-size)": (
            # vLLM sets it to the block size with prefix caching, else to the context length.
            cache.mamba_block_size not in (None, cache.block_size, model.max_model_len)
            and cache.num_gpu_blocks is None  # else the context may have been shortened since
        ),
        "--hf-config-path (mlx-lm reads the config.json beside the weights)": (
            model.hf_config_path not in (None, model.model)
        ),
        "--hf-overrides as a function (give a dictionary)": callable(model.hf_overrides),
        "--enable-prompt-embeds": model.enable_prompt_embeds,
        "encoder-decoder models": model.is_encoder_decoder,
    }


def _speculation_refusals(config: VllmConfig) -> dict[str, bool]:
    speculation, model = config.speculative_config, config.model_config
    if speculation is None:
        return {}
    option = "--speculative-config "
    method = BY_NAME.get(speculation.method or "")
    if method is None:
        choices = ", ".join(SPECULATIVE_METHODS)
        return {f"{option}method {speculation.method!r} (choose one of {choices})": True}
    (architecture, *_) = getattr(speculation.draft_model_config, "architectures", None) or ("",)
    served = architectures_of(method.names[0])
    return checkpoint.refusals(config) | {
        f"{option}method {speculation.method!r} with {architecture} (served are "
        f"{', '.join(served)})": bool(served) and architecture not in served,
        f"{option}rejection_sample_method {speculation.rejection_sample_method!r} (only the "
        "lossless 'standard')": speculation.rejection_sample_method != "standard",
        f"{option}draft_sample_method {speculation.draft_sample_method!r} (drafts are the most "
        "likely tokens: 'greedy')": speculation.draft_sample_method != "greedy",
        f"{option}kv_cache_dtype {speculation.kv_cache_dtype!r} (drafts share the model's cache)": (
            cache_dtypes.canonical(speculation.kv_cache_dtype or config.cache_config.cache_dtype)
            != cache_dtypes.canonical(config.cache_config.cache_dtype)
        ),
        f"{option}enable_adaptive_verification (draft lengths adapt by themselves)": (
            speculation.enable_adaptive_verification
        ),
        f"{option}draft_lm_head_quantization (a draft network's weights are served as its files "
        "have them)": speculation.draft_lm_head_quantization is not None,
        f"{option}use_heterogeneous_vocab": speculation.use_heterogeneous_vocab,
        f"{option}parallel_drafting": (
            speculation.parallel_drafting and speculation.method not in block_config.METHODS
        ),
        f"{option}disable_padded_drafter_batch": speculation.disable_padded_drafter_batch,
        f"{option}num_speculative_tokens {speculation.num_speculative_tokens} (it must leave room "
        f"for a token within --max-model-len {model.max_model_len})": (
            speculation.num_speculative_tokens + 2 > model.max_model_len
        ),
        "--logits-processors together with --speculative-config": bool(model.logits_processors),
    }


def _serving_refusals(config: VllmConfig) -> dict[str, bool]:
    transfer = config.kv_transfer_config
    extra = {} if transfer is None else transfer.kv_connector_extra_config
    key = extra.get("salt_key") or AdditionalConfig.of(config).prefix_cache_salt_key
    return start.refusals(
        config.parallel_config._api_process_count, None if key is None else Path(key).expanduser()
    )
