# SPDX-License-Identifier: Apache-2.0
"""Collects the facts, apart from requests, that tokens depend on; all ranks must agree on them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from metal_kernels.cache import cache_dir
from vllm_metal.identity import facts as facts_of
from vllm_metal.identity import weights_digest
from vllm_metal.identity.facts import plain
from vllm_metal.identity.fingerprint import differences, network_facts
from vllm_metal.settings import envs

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def releases() -> dict[str, str]:
    """Returns the versions of packages that affect results, and a digest of the plugin's code."""
    return {
        "vllm": version("vllm"),
        "vllm_metal": facts_of.sources(facts_of.NOT_IN_ENGINE),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
    }


def of(vllm_config: VllmConfig) -> dict[str, Any]:
    """Returns, as JSON data, what must be equal on all ranks: releases, model, weights and dtypes.

    Args:
        vllm_config: configuration, completed by the platform; the weights must be on disk.

    Raises:
        OSError: a weight file cannot be read.
    """
    model = vllm_config.model_config
    memo = cache_dir() / "weights" / "digests.json"
    facts = network_facts(model)
    del facts["model"]  # weights and configuration identify it, wherever its files are
    return {
        **releases(),
        "device": envs.requested_device(),
        **facts,
        "weights": weights_digest.of_networks(vllm_config, memo),
        "dtype": plain(model.dtype),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
    }


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Describes in one line how another rank's facts differ; empty if they do not."""
    return "; ".join(differences(ours, theirs, "here"))
