# SPDX-License-Identifier: Apache-2.0
"""Checks that the ranks of an engine run the same code on the same weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_metal.settings import envs, facts

if TYPE_CHECKING:
    from vllm.config import VllmConfig


#: Options by whose values every rank computes, and where vLLM's configuration has them.
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
    """Ranks would compute parts of different models."""


def facts_of(config: VllmConfig, memo: Path | None) -> dict[str, str]:
    """By name what must be the same on all ranks.

    Args:
        config: vLLM's.
        memo: see `weights_digest.of_networks`.

    Raises:
        OSError: a file of the weights cannot be read.
    """
    from vllm_metal.kv_transfer import weights_digest  # reads all files: only several ranks need it

    model = config.model_config
    return {
        "vllm-metal": facts.digest({"sources": facts.sources()}),
        "vllm": version("vllm"),
        "mlx": version("mlx"),
        "mlx-lm": version("mlx-lm"),
        "device": str(envs.requested_device() or "metal"),
        "dtype": str(model.dtype),
        "config.json": facts.digest(
            {"config": facts.plain(config.model_config.hf_config.to_dict())}
        ),
        "weights": weights_digest.of_networks(config, memo)["target"],
        **settings_of(config),
    }


def settings_of(config: VllmConfig) -> dict[str, str]:
    """Values of SETTINGS by option, as texts."""
    return {option: str(facts.plain(attrgetter(at)(config))) for option, at in SETTINGS.items()}


def check(mine: Mapping[str, str], share: Callable[[object], Sequence[object]]) -> None:
    """Compares what ranks have; all of them raise where one differs.

    Args:
        mine: of this rank, by name.
        share: gives what each rank gave, by rank; every rank calls it once.

    Raises:
        RanksDiffer: names what differs, and where.
    """
    everyone = share(dict(mine))
    first = everyone[0]
    assert isinstance(first, dict)
    for rank, theirs in enumerate(everyone):
        assert isinstance(theirs, dict)
        if differing := [name for name in first if theirs.get(name) != first[name]]:
            named = ", ".join(
                f"{name} ({first[name]} and {theirs.get(name)})" for name in differing
            )
            raise RanksDiffer(f"ranks 0 and {rank} of the engine differ in {named}")
