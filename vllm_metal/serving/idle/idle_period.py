# SPDX-License-Identifier: Apache-2.0
"""Idle periods after which an engine sleeps, from the settings, and what conflicts with them."""

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
    """A time without requests, and the sleep level that follows it."""

    seconds: float  # after the last request, or after the period before
    level: int


def idle_periods(settings: AdditionalConfig) -> list[IdlePeriod]:
    """Returns the consecutive idle periods before each sleep level; empty without `idle_sleep`."""
    pool, weights = settings.idle_sleep, settings.idle_sleep_weights
    if pool is None:
        return []
    weights = 2 * pool if weights is None else weights
    return [IdlePeriod(pool, level=1)] + [IdlePeriod(weights - pool, level=2)] * (
        weights < math.inf
    )


def refusals(config: VllmConfig, environment: Mapping[str, str] | None = None) -> dict[str, bool]:
    """Maps settings that conflict with `idle_sleep` to whether each is set.

    `environment` defaults to this process's.
    """
    if AdditionalConfig.of(config).idle_sleep is None:
        return {}
    environment = os.environ if environment is None else environment
    num_servers = config.parallel_config._api_process_count
    return {
        f"--api-server-count {num_servers} with {SETTING} (no server can tell whether the "
        "others are idle: leave it out)": num_servers > 1,
        f"VLLM_USE_RUST_FRONTEND=1 with {SETTING} (that front end does not wake an engine up)": (
            environment.get("VLLM_USE_RUST_FRONTEND", "0").lower() in ("1", "true")
        ),
    }
