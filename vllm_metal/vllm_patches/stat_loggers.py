# SPDX-License-Identifier: Apache-2.0
"""A stat logger of this platform beside vLLM's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_metal.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.loggers import AggregateStatLoggerBase


MakeLogger = Callable[["VllmConfig", list[int]], "AggregateStatLoggerBase"]


def add_stat_logger(make: MakeLogger) -> None:
    """Has every engine's statistics go to one more logger; call it once vLLM is loaded.

    vLLM's entry point for such loggers (`vllm.stat_logger_plugins`) is not used for three reasons.
    With a logger there, vLLM collects statistics though --disable-log-stats asks for none. `LLM`
    does not look there. And what such a logger registers is gone when vLLM registers its metrics.

    Args:
        make: makes the logger of an engine of its configuration, and of the engines' indices.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager

    def adding(
        init: Callable[..., None], self: Any, vllm_config: VllmConfig, *args: Any, **options: Any
    ) -> None:
        init(self, vllm_config, *args, **options)
        # The first: a worker's figures come where vLLM's loggers look for a connector's.
        self.stat_loggers.insert(0, make(vllm_config, self.engine_indexes))

    replace(StatLoggerManager, "__init__", adding)
