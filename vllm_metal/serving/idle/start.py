# SPDX-License-Identifier: Apache-2.0
"""Has idle engines of servers sleep where `idle_sleep` asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_metal.patches.vllm_patches import engine_sleep
from vllm_metal.serving.idle.idle_period import SETTING, spells
from vllm_metal.serving.idle.sleeper import Sleeper
from vllm_metal.serving.idle.unavailable import Unavailable
from vllm_metal.settings.additional_config import AdditionalConfig

if TYPE_CHECKING:
    from starlette.types import ASGIApp
    from vllm.config import VllmConfig


def keep_engines() -> None:
    """Gives engines that are made from now on a sleeper, where their settings ask for one."""
    engine_sleep.keep(_sleeper, _refuse_without_a_loop)


def around(app: ASGIApp, state: Any) -> ASGIApp:
    """The application, which answers 503 where its engine cannot wake up.

    Args:
        app: vLLM's, with its middlewares.
        state: that vLLM gave it.
    """
    return Unavailable(app) if engine_sleep.is_kept(state.engine_client) else app


def _sleeper(config: VllmConfig, engine: engine_sleep.Engine) -> Sleeper | None:
    asked = spells(AdditionalConfig.of(config))
    return Sleeper(engine, asked) if asked else None


def _refuse_without_a_loop(config: VllmConfig) -> None:
    if AdditionalConfig.of(config).idle_sleep is not None:
        raise ValueError(
            f"vllm-metal does not support {SETTING} with LLM (nothing runs between its "
            "calls that could detect idleness: call sleep() and wake_up(), or use `vllm "
            "serve` or AsyncLLM)"
        )
