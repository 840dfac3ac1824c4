# SPDX-License-Identifier: Apache-2.0
"""Shows the figures of steps: in /metrics, and in one line of the log beside vLLM's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge, Histogram
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import AggregateStatLoggerBase
from vllm.v1.metrics.stats import CachingMetrics

from vllm_metal.metrics.figures import StepFigures

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

logger = init_logger(__name__)

_GIB = 2**30
#: Upper bounds in seconds: from a small model's step to a step at which streams stall.
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class MetalStatLogger(AggregateStatLoggerBase):
    """Gets each step's statistics in the server's process, and its figures with them."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        """Registers the metrics; vLLM's own must be there, for it drops all others of its prefix.

        Args:
            vllm_config: of the engines.
            engine_indexes: by which vLLM tells them apart.
        """
        model_name = vllm_config.model_config.served_model_name
        metrics = _Metrics()
        self._engines = {
            index: _Engine(metrics, str(model_name), index) for index in engine_indexes
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


class _Metrics:
    """The metrics of a process."""

    def __init__(self) -> None:
        labels = ("model_name", "engine")
        self.memory = Gauge(
            "vllm:metal_device_memory_bytes",
            "Device memory that MLX holds: live arrays, and freed buffers it keeps to use again.",
            labels,
            multiprocess_mode="mostrecent",
        )
        self.budget = Gauge(
            "vllm:metal_memory_budget_bytes",
            "Device memory that MLX is held to.",
            labels,
            multiprocess_mode="mostrecent",
        )
        self.host = Histogram(
            "vllm:metal_step_host_seconds",
            "Time that a step took the engine's host, before the device had all of it.",
            labels,
            buckets=_BUCKETS,
        )
        self.device = Histogram(
            "vllm:metal_step_device_seconds",
            "Time from a step's hand-over, or the end of the step before, until its tokens came.",
            labels,
            buckets=_BUCKETS,
        )
        self.busy = Counter(
            "vllm:metal_device_seconds",
            "Device time of steps, by what its rows were for: prompts (prefill), answers (decode).",
            (*labels, "kind"),
        )
        self.failed = Counter(
            "vllm:metal_failed_steps",
            "Steps that failed: their requests ended with an error, and all others started again.",
            labels,
        )


class _Engine:
    """One engine's metrics, and what has come since its last line in the log."""

    def __init__(self, metrics: _Metrics, model_name: str, index: int) -> None:
        labels = (model_name, str(index))
        self._index = index
        self._memory = metrics.memory.labels(*labels)
        self._budget = metrics.budget.labels(*labels)
        self._host = metrics.host.labels(*labels)
        self._device = metrics.device.labels(*labels)
        self._prefill = metrics.busy.labels(*labels, "prefill")
        self._decode = metrics.busy.labels(*labels, "decode")
        self._failed = metrics.failed.labels(*labels)
        self._prefix_cache = CachingMetrics()  # of as many requests as in vLLM's own line
        self._newest: StepFigures | None = None
        self._failed_steps = 0  # counted so far
        self._reset()

    def _reset(self) -> None:
        self._host_seconds: list[float] = []
        self._device_seconds: list[float] = []
        self._num_drafted = self._num_accepted = 0

    def record(self, stats: SchedulerStats) -> None:
        self._prefix_cache.observe(stats.prefix_cache_stats)
        if (drafts := stats.spec_decoding_stats) is not None:
            self._num_drafted += drafts.num_draft_tokens
            self._num_accepted += drafts.num_accepted_tokens
        figures = StepFigures.take_from(stats)
        if figures is None:
            return
        self._newest = figures
        self._host_seconds.append(figures.host_seconds)
        self._host.observe(figures.host_seconds)
        if figures.device_seconds is not None:
            self._device_seconds.append(figures.device_seconds)
            self._device.observe(figures.device_seconds)
            self._prefill.inc(figures.prefill_seconds)
            self._decode.inc(figures.device_seconds - figures.prefill_seconds)
        self._memory.set(figures.device_memory_bytes)
        if figures.memory_budget_bytes is not None:
            self._budget.set(figures.memory_budget_bytes)
        self._failed.inc(figures.failed_steps - self._failed_steps)
        self._failed_steps = figures.failed_steps

    def log(self) -> None:
        if not self._host_seconds or self._newest is None:
            return
        parts = [_memory_of(self._newest), _step_time("host", self._host_seconds)]
        if self._device_seconds:
            parts.append(_step_time("device", self._device_seconds))
        parts.append(f"Failed steps: {self._failed_steps}")
        if not self._prefix_cache.empty:
            parts.append(f"Prefix cache hit rate: {self._prefix_cache.hit_rate:.1%}")
        if self._num_drafted:
            parts.append(f"Draft acceptance rate: {self._num_accepted / self._num_drafted:.1%}")
        logger.info("Engine %03d: %s", self._index, ", ".join(parts))
        self._reset()


def _memory_of(figures: StepFigures) -> str:
    held = f"Device memory: {figures.device_memory_bytes / _GIB:.2f}"
    if figures.memory_budget_bytes is None:
        return f"{held} GiB"
    return f"{held} of {figures.memory_budget_bytes / _GIB:.2f} GiB"


def _step_time(of: str, seconds: list[float]) -> str:
    return f"Mean {of} time of a step: {1e3 * sum(seconds) / len(seconds):.1f} ms"
