# SPDX-License-Identifier: Apache-2.0
"""Reads of the settings how long an engine is idle before it sleeps; says where it cannot be."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_metal.settings.additional_config import OPTION, AdditionalConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SETTING = f"{OPTION} idle_sleep"


@dataclass(frozen=True)
class IdlePeriod:
    """How long no request may have come, and what happens then."""

    seconds: float  # after the last request, or the spell before
    level: int  # of sleep


def spells(settings: AdditionalConfig) -> list[IdlePeriod]:
    """How long an engine is idle before it sleeps, and how deep; none: it does not."""
    pool, weights = settings.idle_sleep, settings.idle_sleep_weights
    if pool is None:
        return []
    weights = 2 * pool if weights is None else weights
    return [IdlePeriod(pool, level=1)] + [IdlePeriod(weights - pool, level=2)] * (
        weights < math.inf
    )


def refusals(config: VllmConfig, environment: Mapping[str, str] | None = None) -> dict[str, bool]:
    """Settings that do not go with `idle_sleep`, and whether each was asked for.

    Args:
        config: vLLM's.
        environment: variables; None: of this process.
    """
    if AdditionalConfig.of(config).idle_sleep is None:
        return {}
    environment = os.environ if environment is None else environment
    num_servers = config.parallel_config._api_process_count
    return {
        f"--api-server-count {num_servers} with {SETTING} (none of them knows when the others "
        "are idle: leave it out)": num_servers > 1,
        f"VLLM_USE_RUST_FRONTEND=1 with {SETTING} (that front end does not wake an engine up)": (
            environment.get("VLLM_USE_RUST_FRONTEND", "0").lower() in ("1", "true")
        ),
    }
