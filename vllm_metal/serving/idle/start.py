# SPDX-License-Identifier: Apache-2.0
"""Enables idle sleep in servers whose settings have `idle_sleep`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_metal.patches.vllm_patches import engine_sleep
from vllm_metal.serving.idle.idle_period import SETTING, idle_periods
from vllm_metal.serving.idle.sleeper import Sleeper
from vllm_metal.serving.idle.unavailable import Unavailable
from vllm_metal.settings.additional_config import AdditionalConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from vllm.config import VllmConfig


def keep_engines() -> None:
    """Gives each engine that is created later a Sleeper, if its settings have `idle_sleep`."""
    engine_sleep.manage(_make_sleeper, _refuse_without_a_loop)


def around(app: ASGIApp, state: Any) -> ASGIApp:
    """Wraps vLLM's application so that it returns 503 if its engine cannot wake up."""
    return Unavailable(app) if engine_sleep.is_managed(state.engine_client) else app


def _make_sleeper(config: VllmConfig, engine: engine_sleep.Engine) -> Sleeper | None:
    periods = idle_periods(AdditionalConfig.of(config))
    return Sleeper(engine, periods) if periods else None


def _refuse_without_a_loop(config: VllmConfig) -> None:
    if AdditionalConfig.of(config).idle_sleep is not None:
        raise ValueError(
            f"vllm-metal does not support {SETTING} with LLM (nothing runs between its "
            "calls that could detect idleness: call sleep() and wake_up(), or use `vllm "
            "serve` or AsyncLLM)"
        )
