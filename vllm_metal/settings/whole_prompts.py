# SPDX-License-Identifier: Apache-2.0
"""Tells which models attend to whole prompts, and rejects what splits or shares prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

_SETTING = "prefix_lm=true in config.json"
_REASON = "K and V of a prompt's tokens depend on the whole prompt"


def attends_to_whole_prompts(model_config: ModelConfig | None) -> bool:
    """Whether a prompt's tokens attend to all of the prompt, and others to what precedes them."""
    if model_config is None:
        return False
    config = model_config.hf_config
    return config.model_type == "hrm_text" and bool(getattr(config, "prefix_lm", True))


def set_defaults(args: EngineArgs, model_config: ModelConfig) -> None:
    """Disables prefix caching and chunked prefill for such models.

    Raises ValueError if the user has enabled one of them.
    """
    if not attends_to_whole_prompts(model_config):
        return
    for field in ("enable_prefix_caching", "enable_chunked_prefill"):
        if getattr(args, field):
            option = f"--{field.replace('_', '-')}"
            raise ValueError(f"{option} is not supported with {_SETTING}: {_REASON}. Leave it out")
        setattr(args, field, False)


def refusals(config: VllmConfig) -> dict[str, bool]:
    """Maps settings that split or share prompts to whether they are set; empty for other models."""
    model, parallel = config.model_config, config.parallel_config
    if not attends_to_whole_prompts(model):
        return {}
    given = {
        "--enable-prefix-caching": config.cache_config.enable_prefix_caching,
        "--enable-chunked-prefill": config.scheduler_config.enable_chunked_prefill,
        "prefix_cache_dir or --kv-transfer-config": config.kv_transfer_config is not None,
        "--runner pooling": model.runner_type == "pooling",
        "--pipeline-parallel-size or --tensor-parallel-size above 1": parallel.world_size > 1,
    }
    return {f"{option} with {_SETTING} ({_REASON})": is_set for option, is_set in given.items()}
