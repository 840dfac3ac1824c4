# SPDX-License-Identifier: Apache-2.0
"""Refuses a start where ranks that share a model are not alike, and names what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch.distributed

from metal_kernels.cache import cache_dir
from vllm_metal.distributed import groups
from vllm_metal.kv_transfer import weights_digest
from vllm_metal.models.loader import ModelLoadError
from vllm_metal.settings import envs, facts

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

PACKAGES = ("vllm", "mlx", "mlx-lm", "vllm-metal", "torch")
#: Options whose values every rank computes by, and where vLLM's configuration has them.
SETTINGS = {
    "--dtype": "model_config.dtype",
    "--seed": "model_config.seed",
    "--max-model-len": "model_config.max_model_len",
    "--hf-overrides": "model_config.hf_overrides",
    "--max-logprobs": "model_config.max_logprobs",
    "--logprobs-mode": "model_config.logprobs_mode",
    "--logits-processors": "model_config.logits_processors",
    "--max-num-batched-tokens": "scheduler_config.max_num_batched_tokens",
    "--max-num-seqs": "scheduler_config.max_num_seqs",
    "--block-size": "cache_config.block_size",
    "--kv-cache-dtype": "cache_config.cache_dtype",
    "--tensor-parallel-size": "parallel_config.tensor_parallel_size",
    "--pipeline-parallel-size": "parallel_config.pipeline_parallel_size",
    "--speculative-config": "speculative_config",
    "--lora settings": "lora_config",
    "--additional-config": "additional_config",
}
#: Of a speculative configuration: what holds the rest of vLLM's configuration again.
_NOT_ITS_OWN = ("target_model_config", "target_parallel_config", "draft_model_config")
_LONGEST_VALUE = 40  # characters of a value in a message
_LONGEST_ERROR = 200


class DifferentRanks(ValueError):
    """Ranks of one model that would not compute the same."""


def facts_of(config: VllmConfig) -> dict[str, str]:
    """What must be the same on all ranks, by the name that an error gives it.

    Weights are told by their contents, which the first start reads once to digest them.

    Args:
        config: vLLM's, after the platform's check.
    """
    found = {name: str(version) for name, version in facts.versions(*PACKAGES).items()}
    found["vllm-metal's sources"] = facts.sources()
    found["VLLM_METAL_DEVICE"] = str(envs.requested_device())
    found["VLLM_METAL_KERNELS"] = envs.kernels()
    found["config.json"] = facts.digest({"config": config.model_config.hf_config.to_dict()})
    for option, place in SETTINGS.items():
        found[option] = _text(attrgetter(place)(config))
    try:
        memo = cache_dir() / "weights" / "digests.json"
        found |= {
            f"weights of the {network}": digest
            for network, digest in weights_digest.of_networks(config, memo).items()
        }
    except (OSError, ModelLoadError) as error:  # told to all, where others have them
        found["weights of the target"] = f"unreadable: {error}"[:_LONGEST_ERROR]
    return found


def check_ranks(config: VllmConfig) -> None:
    """Refuses ranks that are not alike; all of an engine call it. Nothing where a rank is all.

    Raises:
        DifferentRanks: see `check`.
    """
    if groups.is_distributed(config.parallel_config):
        from vllm.distributed.parallel_state import get_world_group

        check(facts_of(config), get_world_group().cpu_group)


def least(parallel: ParallelConfig, limit: int | None) -> int | None:
    """The smallest of the limits that ranks found; None: no rank has one. All ranks call it.

    Args:
        parallel: of the engine.
        limit: of this rank, by its memory say.
    """
    if not groups.is_distributed(parallel):
        return limit
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group().cpu_group
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, limit, group=group)
    return min((each for each in every if each is not None), default=None)


def check(found: Mapping[str, str], group: torch.distributed.ProcessGroup) -> None:
    """Compares facts of this rank with those of all others; every rank of the group calls it.

    Args:
        found: of this rank, by name.
        group: over a CPU back end, such as vLLM's `get_world_group().cpu_group`.

    Raises:
        DifferentRanks: a fact is not the same everywhere; each rank raises the same error.
    """
    every: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(every, dict(found), group=group)
    differing = differences(every)
    if differing:
        raise DifferentRanks(
            f"the ranks of one model must be alike, and are not: {'; '.join(differing)}"
        )


def differences(every: Sequence[Mapping[str, str]]) -> list[str]:
    """What is not the same on all ranks, a sentence a fact.

    Args:
        every: facts by rank.
    """
    names = dict.fromkeys(name for of_rank in every for name in of_rank)
    return [_told(name, every) for name in names if len({f.get(name) for f in every}) > 1]


def _told(name: str, every: Sequence[Mapping[str, str]]) -> str:
    """Which ranks have which value of a fact."""
    by_value: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(every):
        by_value.setdefault(of_rank.get(name, "nothing"), []).append(rank)
    return f"{name}: " + ", ".join(
        f"{_short(value)} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        for value, ranks in by_value.items()
    )


def _text(value: Any) -> str:
    """A setting as text that is the same in every process."""
    plain = facts.plain(value, _NOT_ITS_OWN)
    if isinstance(plain, dict | list):
        return facts.digest({"value": plain})
    return str(plain)


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 1]}…"
