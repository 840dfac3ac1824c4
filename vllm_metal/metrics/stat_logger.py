# SPDX-License-Identifier: Apache-2.0
"""Shows the steps' metrics in /metrics, and in one log line next to vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import CachingMetrics

from vllm_metal.metrics.metric import Shown
from vllm_metal.metrics.step_metrics import STEP, StepMetrics, StepsInWords
from vllm_metal.patches.vllm_patches import step_result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

logger = init_logger(__name__)


class MetalStatLogger(AggregateStatLoggerBase):
    """Receives each step's statistics and metrics in the server's process."""

    def __init__(
        self,
        others: Callable[[VllmConfig], Mapping[str, type]],
        vllm_config: VllmConfig,
        engine_indexes: list[int],
    ) -> None:
        """Registers the metrics.

        Args:
            others: returns further dataclasses of metrics for a configuration, by source.
            vllm_config: configuration of the engines.
            engine_indexes: vLLM's ids of the engines.
        """
        # After vLLM has registered its own metrics: it first drops all others with its prefix.
        model_name = str(vllm_config.model_config.served_model_name)
        types = {STEP: StepMetrics, **others(vllm_config)}
        shown = {
            source: Shown(metrics_type, ("model_name", "engine"))
            for source, metrics_type in types.items()
        }
        self._engines = {
            index: _Engine(
                index, {source: each.of(model_name, str(index)) for source, each in shown.items()}
            )
            for index in engine_indexes
        }

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Records a step's metrics; called about once per step."""
        if scheduler_stats is not None and engine_idx in self._engines:
            self._engines[engine_idx].record(scheduler_stats)

    def log(self) -> None:
        """Logs a line for each engine that has computed something since its last line."""
        for engine in self._engines.values():
            engine.log()

    def log_engine_initialized(self) -> None:
        return


class _Engine:
    def __init__(self, index: int, show: Mapping[str, Callable[[Mapping[str, Any]], None]]) -> None:
        self._index = index
        self._show = show
        self._prefix_cache = CachingMetrics()  # over as many requests as vLLM's own line
        self._reset()

    def _reset(self) -> None:
        self._steps = StepsInWords()
        self._num_drafted = self._num_accepted = 0

    def record(self, stats: SchedulerStats) -> None:
        self._prefix_cache.observe(stats.prefix_cache_stats)
        if (drafts := stats.spec_decoding_stats) is not None:
            self._num_drafted += drafts.num_draft_tokens
            self._num_accepted += drafts.num_accepted_tokens
        sent = step_result.take_metrics(stats)
        for source, values in sent.items():
            self._show[source](values)
        if STEP in sent:
            self._steps.add(StepMetrics(**sent[STEP]))

    def log(self) -> None:
        if not (parts := self._steps.words()):
            return
        if not self._prefix_cache.empty:
            parts.append(f"Prefix cache hit rate: {self._prefix_cache.hit_rate:.1%}")
        if self._num_drafted:
            parts.append(f"Draft acceptance rate: {self._num_accepted / self._num_drafted:.1%}")
        logger.info("Engine %03d: %s", self._index, ", ".join(parts))
        self._reset()
