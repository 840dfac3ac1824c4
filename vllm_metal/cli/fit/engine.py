# SPDX-License-Identifier: Apache-2.0
"""The parts of vLLM's configuration that the memory estimate reads."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch

# Single modules, because `fit` imports only these parts of vLLM (vllm_patches.partial_imports).
from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.model import _is_valid_dtype
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig

from vllm_metal.engine.models.loader import MLX_DTYPES
from vllm_metal.settings import cache_dtypes, envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheDType

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in MLX_DTYPES}
#: Keys of config.json with the maximum length of a text; the first one present counts.
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


@dataclass(frozen=True)
class _TextDrafts:
    """The part of a SpeculativeConfig that vLLM reads for drafts without a network."""

    num_speculative_tokens: int
    method: str = "ngram"

    def use_eagle(self) -> bool:
        return False

    def use_eagle_block_drop(self) -> bool:
        return False


@dataclass(frozen=True)
class AdapterLimits:
    """The part of a LoRAConfig that the estimate reads."""

    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    target_modules: None = None


def adapters(
    max_loras: int | None, max_cpu_loras: int | None, max_lora_rank: int | None
) -> AdapterLimits | None:
    """Returns the adapter limits with vLLM's defaults, or None without --max-loras.

    Raises ValueError if another limit is given without it.
    """
    if max_loras is None:
        if max_cpu_loras or max_lora_rank:
            raise ValueError("--max-cpu-loras and --max-lora-rank need --max-loras")
        return None
    return AdapterLimits(max_loras, max_cpu_loras or max_loras, max_lora_rank or 16)


def config(
    *,
    model_type: str,
    dtype: torch.dtype,
    cache_dtype: str,
    block_size: int,
    block_size_asked: bool = False,
    max_model_len: int,
    fitted: bool = False,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    gpu_memory_utilization: float | None = None,
    num_drafts: int = 0,
    runner_type: str = "generate",
    stages: int | None = None,
    adapters: AdapterLimits | None = None,
) -> VllmConfig:
    """Makes a configuration with vLLM's defaults, without loading the model.

    It has everything that vLLM's planning of the KV cache reads. `fitted`: max_model_len was not
    requested, so it may shrink until it fits. `num_drafts`: number of n-gram drafts. `stages`:
    number of pipeline stages that work at once, None for a single process.
    """
    cache = CacheConfig(block_size=block_size)
    cache.user_specified_block_size = block_size_asked
    cache.cache_dtype = cast("CacheDType", cache_dtypes.canonical(cache_dtype))
    cache.kv_cache_layout = "LBNHC"  # as the worker sets it
    if gpu_memory_utilization is not None:
        cache.gpu_memory_utilization = gpu_memory_utilization
    namespace = SimpleNamespace(
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            async_scheduling=stages is None,  # as vLLM and we decide for this platform
            disable_hybrid_kv_cache_manager=False,
        ),
        parallel_config=ParallelConfig(),
        attention_config=AttentionConfig(),
        model_config=SimpleNamespace(
            max_model_len=max_model_len,
            original_max_model_len=-1 if fitted else max_model_len,
            dtype=dtype,
            runner_type=runner_type,
            max_logprobs=20,  # vLLM's defaults from here on
            logprobs_mode="raw_logprobs",
            seed=0,
            hf_config=SimpleNamespace(model_type=model_type),
        ),
        speculative_config=_TextDrafts(num_drafts) if num_drafts else None,
        kv_transfer_config=None,
        lora_config=adapters,
        # Derived by VllmConfig: no lookahead; two steps in flight, or one per stage.
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=(stages or 2) * max_num_batched_tokens,
    )
    return cast("VllmConfig", namespace)


def dtype_of(
    content: dict[str, Any], kind: envs.Device, asked: str = "auto", encoder: bool = False
) -> torch.dtype:
    """Returns the dtype that vLLM chooses for --dtype; `auto` replaces float32 by a 16-bit one.

    Args:
        content: content of config.json.
        kind: the device; on a CPU the dtype is float32 (MetalPlatform.supported_dtypes).
        asked: value of --dtype.
        encoder: whether the model pools; vLLM then prefers float16.
    """
    if asked != "auto":
        return DTYPES[asked]
    if kind == "cpu":
        return torch.float32
    name = next(
        (
            part[key]
            for part in _parts(content)
            for key in ("dtype", "torch_dtype")
            if part.get(key)
        ),
        "float32",
    )
    dtype = DTYPES.get(str(name).removeprefix("torch."), torch.float32)
    model_type = str(content.get("model_type"))
    if _is_valid_dtype(model_type, dtype) and dtype != torch.float32:
        return dtype
    half = encoder and _is_valid_dtype(model_type, torch.float16)
    return torch.float16 if half else torch.bfloat16


def longest_text(content: dict[str, Any]) -> int | None:
    """Returns the longest text in tokens that a config.json states, or None."""
    for part in _parts(content):
        for key in _LENGTHS:
            if part.get(key):
                scaling = part.get("rope_scaling") or {}
                scaled = scaling.get("rope_type", scaling.get("type")) in ("linear", "dynamic")
                # Gemma 3 states the length after scaling, as vLLM knows.
                family = part.get("model_type") or content.get("model_type")
                if scaled and "gemma3" not in str(family):
                    return int(part[key] * scaling.get("factor", 1))
                return int(part[key])
    return None


def _parts(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for part in (content, content.get("text_config")) if isinstance(part, dict)]
