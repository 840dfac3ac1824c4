# SPDX-License-Identifier: Apache-2.0
"""Decides which settings are refused beside an encoder, and how long its texts may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_metal.encoders.served import ARCHITECTURES, of_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refusals(config: VllmConfig) -> dict[str, bool]:
    """Settings of an encoder by name, and whether each was asked for."""
    model = config.model_config
    if model is None or model.runner_type != "pooling":
        return {}
    served = of_config(config)
    if served is None:
        architecture, choices = model.architecture, ", ".join(sorted(ARCHITECTURES))
        return {
            f"the architecture {architecture} (encoders that are served: {choices})": (
                model.attn_type == "encoder_only"
            )
        }
    cache, reads_whole = config.cache_config, "an encoder reads whole texts"
    keeps_none = "an encoder keeps no K/V"
    return {
        f"--enable-chunked-prefill ({reads_whole})": (
            config.scheduler_config.enable_chunked_prefill
        ),
        f"--enable-prefix-caching ({keeps_none})": cache.enable_prefix_caching,
        f"--kv-cache-dtype {cache.cache_dtype} ({keeps_none})": cache.cache_dtype != "auto",
        f"--kv-cache-memory-bytes ({keeps_none})": cache.kv_cache_memory_bytes is not None,
        f"--num-gpu-blocks-override ({keeps_none})": cache.num_gpu_blocks_override is not None,
        f"--kv-transfer-config, or prefix_cache_dir ({keeps_none})": (
            config.kv_transfer_config is not None
        ),
        f"--convert {model.convert_type} of {model.architecture} (leave it out)": (
            model.convert_type == ("embed" if served.classifies else "classify")
        ),
        "--enable-lora (of an encoder)": config.lora_config is not None,
        "--speculative-config (an encoder generates nothing)": (
            config.speculative_config is not None
        ),
        **_positions(config),
    }


def _positions(config: VllmConfig) -> dict[str, bool]:
    """Whether texts were asked for that are longer than the table of positions."""
    model, most = config.model_config, most_tokens(config)
    asked = model.original_max_model_len not in (None, -1)
    return {
        f"--max-model-len {model.max_model_len} (the model has {most} positions)": (
            asked and most is not None and model.max_model_len > most
        )
    }


def fit_positions(config: VllmConfig) -> None:
    """Makes the longest text no longer than an encoder's table of positions; nothing of others."""
    if (most := most_tokens(config)) is not None:
        model = config.model_config
        model.max_model_len = min(model.max_model_len, most)


def most_tokens(config: VllmConfig) -> int | None:
    """Positions of an encoder's table; None: it has none, or the model is no encoder."""
    served = of_config(config)
    if served is None or served.family.positions is None:
        return None
    return served.family.positions(config.model_config.hf_config.to_dict())
