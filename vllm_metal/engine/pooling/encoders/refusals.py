# SPDX-License-Identifier: Apache-2.0
"""Decides which settings only encoders reject, and how long their texts may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_metal.engine.pooling.encoders.served import of_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def refusals(config: VllmConfig) -> dict[str, bool]:
    """Maps rejected settings of an encoder to whether each was requested."""
    model, served, cache = config.model_config, of_config(config), config.cache_config
    if served is None:
        return {}
    keeps_none = "an encoder keeps no K/V"
    return {
        f"--kv-cache-dtype {cache.cache_dtype} ({keeps_none})": cache.cache_dtype != "auto",
        f"--kv-cache-memory-bytes ({keeps_none})": cache.kv_cache_memory_bytes is not None,
        f"--num-gpu-blocks-override ({keeps_none})": cache.num_gpu_blocks_override is not None,
        f"--convert {model.convert_type} of {model.architecture} (leave it out)": (
            model.convert_type == ("embed" if served.classifies else "classify")
        ),
        "--enable-lora (of an encoder)": config.lora_config is not None,
        **_positions(config),
    }


def _positions(config: VllmConfig) -> dict[str, bool]:
    model, most = config.model_config, most_tokens(config)
    # Without --max-model-len, `fit_positions` shortens the length instead.
    asked = model.original_max_model_len not in (None, -1)
    return {
        f"--max-model-len {model.max_model_len} (the model has {most} positions)": (
            asked and most is not None and model.max_model_len > most
        )
    }


def fit_positions(config: VllmConfig) -> None:
    """Limits the longest text to an encoder's position table; no-op for other models."""
    if (most := most_tokens(config)) is not None:
        model = config.model_config
        model.max_model_len = min(model.max_model_len, most)


def most_tokens(config: VllmConfig) -> int | None:
    """Returns the size of an encoder's position table; None: no table, or not an encoder."""
    served = of_config(config)
    if served is None or served.family.positions is None:
        return None
    return served.family.positions(config.model_config.hf_config.to_dict())
