# SPDX-License-Identifier: Apache-2.0
"""All that tokens depend on but the request: what ranks of one server must have alike."""

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
    """Versions of the packages that compute, and the digest of the plugin's sources, by name."""
    return {
        "vllm": version("vllm"),
        "vllm_metal": facts_of.sources(facts_of.NOT_IN_ENGINE),
        "mlx": version("mlx"),
        "mlx_lm": version("mlx-lm"),
    }


def of(vllm_config: VllmConfig) -> dict[str, Any]:
    """The facts of an engine whose weights are loaded; JSON has them unchanged.

    Args:
        vllm_config: after the platform's check.

    Raises:
        OSError: a file of the weights cannot be read.
    """
    model = vllm_config.model_config
    memo = cache_dir() / "weights" / "digests.json"
    facts = network_facts(model)
    del facts["model"]  # is what its weights and configuration are, wherever it lies
    return {
        **releases(),
        "device": envs.requested_device(),
        **facts,
        "weights": weights_digest.of_networks(vllm_config, memo),
        "dtype": plain(model.dtype),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
    }


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """In what another rank's facts differ from these, in one line; empty where they do not."""
    return "; ".join(differences(ours, theirs, "here"))
