# SPDX-License-Identifier: Apache-2.0
"""Checks that the ranks of an engine run the same code on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from vllm_metal.identity import facts, rank_facts
from vllm_metal.identity.fingerprint import differences

if TYPE_CHECKING:
    from vllm.config import VllmConfig


#: Options that all ranks must share, and their attributes in vLLM's configuration.
SETTINGS = {
    "--seed": "model_config.seed",
    "--max-model-len": "model_config.max_model_len",
    "--hf-overrides": "model_config.hf_overrides",
    "--logprobs-mode": "model_config.logprobs_mode",
    "--max-num-batched-tokens": "scheduler_config.max_num_batched_tokens",
    "--max-num-seqs": "scheduler_config.max_num_seqs",
    "--block-size": "cache_config.block_size",
    "--kv-cache-dtype": "cache_config.cache_dtype",
    "--tensor-parallel-size": "parallel_config.tensor_parallel_size",
    "--pipeline-parallel-size": "parallel_config.pipeline_parallel_size",
    "--additional-config": "additional_config",
}


class RanksDiffer(RuntimeError):
    """Ranks have different code, weights or settings."""


def facts_of(config: VllmConfig) -> dict[str, Any]:
    """Returns everything that must be the same on all ranks, by name.

    Raises OSError: a weights file cannot be read.
    """
    return rank_facts.of(config) | settings_of(config)


def settings_of(config: VllmConfig) -> dict[str, str]:
    """Returns the configured values of SETTINGS as strings, by option."""
    return {option: str(facts.plain(attrgetter(at)(config))) for option, at in SETTINGS.items()}


def check(mine: Mapping[str, Any], share: Callable[[object], Sequence[object]]) -> None:
    """Compares this rank's values with the other ranks', which `share` gathers.

    Raises RanksDiffer: values differ; raised on every rank.
    """
    gathered = share(dict(mine))
    first = gathered[0]
    assert isinstance(first, dict)
    for rank, theirs in enumerate(gathered):
        assert isinstance(theirs, dict)
        if found := differences(first, theirs, "rank 0 has"):
            raise RanksDiffer(
                f"ranks 0 and {rank} of the engine differ: {'; '.join(found)}. Give all ranks the "
                "same files, releases and settings"
            )
