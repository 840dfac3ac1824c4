# SPDX-License-Identifier: Apache-2.0
"""Shows figures that steps bring: in /metrics, and in one line of the log beside vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import CachingMetrics

from vllm_metal.metrics.figures import STEP, StepFigures, StepsInWords
from vllm_metal.metrics.metric import Shown
from vllm_metal.patches.vllm_patches import step_result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

logger = init_logger(__name__)


class MetalStatLogger(AggregateStatLoggerBase):
    """Gets each step's statistics in the server's process, and its figures with them."""

    def __init__(
        self,
        others: Callable[[VllmConfig], Mapping[str, type]],
        vllm_config: VllmConfig,
        engine_indexes: list[int],
    ) -> None:
        """Registers the metrics; vLLM's own must be there, for it drops all others of its prefix.

        Args:
            others: of a configuration, the dataclasses of figures that come beside a step's, by
                whose they are.
            vllm_config: of the engines.
            engine_indexes: by which vLLM tells them apart.
        """
        model_name = str(vllm_config.model_config.served_model_name)
        kinds = {STEP: StepFigures, **others(vllm_config)}
        shown = {whose: Shown(kind, ("model_name", "engine")) for whose, kind in kinds.items()}
        self._engines = {
            index: _Engine(
                index, {whose: each.of(model_name, str(index)) for whose, each in shown.items()}
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
        """Takes what a step brought; called once a step or so."""
        if scheduler_stats is not None and engine_idx in self._engines:
            self._engines[engine_idx].record(scheduler_stats)

    def log(self) -> None:
        """Writes a line for each engine that has computed something since the last."""
        for engine in self._engines.values():
            engine.log()

    def log_engine_initialized(self) -> None:
        return


class _Engine:
    """One engine's metrics, and what has come since its last line in the log."""

    def __init__(self, index: int, show: Mapping[str, Callable[[Mapping[str, Any]], None]]) -> None:
        self._index = index
        self._show = show
        self._prefix_cache = CachingMetrics()  # of as many requests as in vLLM's own line
        self._reset()

    def _reset(self) -> None:
        self._steps = StepsInWords()
        self._num_drafted = self._num_accepted = 0

    def record(self, stats: SchedulerStats) -> None:
        self._prefix_cache.observe(stats.prefix_cache_stats)
        if (drafts := stats.spec_decoding_stats) is not None:
            self._num_drafted += drafts.num_draft_tokens
            self._num_accepted += drafts.num_accepted_tokens
        sent = step_result.take_figures(stats)
        for whose, values in sent.items():
            self._show[whose](values)
        if STEP in sent:
            self._steps.add(StepFigures(**sent[STEP]))

    def log(self) -> None:
        if not (parts := self._steps.words()):
            return
        if not self._prefix_cache.empty:
            parts.append(f"Prefix cache hit rate: {self._prefix_cache.hit_rate:.1%}")
        if self._num_drafted:
            parts.append(f"Draft acceptance rate: {self._num_accepted / self._num_drafted:.1%}")
        logger.info("Engine %03d: %s", self._index, ", ".join(parts))
        self._reset()
