# SPDX-License-Identifier: Apache-2.0
"""Defines StepMetrics, the metrics of one step, and their form in the log."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import ClassVar

from vllm_metal.metrics.metric import Metric

#: Upper bounds in seconds: from a step of a small model to one that stalls streams.
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_GIB = 2**30
_BUSY = "Device time of steps, by the kind of their tokens: prompts (prefill), outputs (decode)."
#: Key of these metrics among all metrics in a step's results.
STEP = "step"


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one submitted step, and of the engine after it; None if unknown.

    `StepMeter` fills the fields without a default. Fields with the default None are measured
    elsewhere: code that builds a part of the step calls `measure`; values known only with the
    step's results are in the results' `metrics`.
    """

    host_seconds: float = Metric(
        "histogram",
        "vllm:metal_step_host_seconds",
        "Host time to prepare a step and submit it to the device.",
        buckets=_BUCKETS,
    ).field()
    #: Upper bound; None: the step sampled no token, so its end is unknown.
    device_seconds: float | None = Metric(
        "histogram",
        "vllm:metal_step_device_seconds",
        "Time from a step's submission, or the previous step's end if later, until its tokens "
        "were ready.",
        buckets=_BUCKETS,
    ).field()
    #: Parts of `device_seconds`, with `decode_seconds`.
    prefill_seconds: float | None = Metric(
        "counter", "vllm:metal_device_seconds", _BUSY, label=("kind", "prefill")
    ).field()
    decode_seconds: float | None = Metric(
        "counter", "vllm:metal_device_seconds", _BUSY, label=("kind", "decode")
    ).field()
    device_memory_bytes: int = Metric(
        "gauge",
        "vllm:metal_device_memory_bytes",
        "Device memory that MLX holds: live arrays, and freed buffers it keeps to use again.",
    ).field()
    #: None: no limit.
    memory_budget_bytes: int | None = Metric(
        "gauge", "vllm:metal_memory_budget_bytes", "Limit of device memory that MLX may hold."
    ).field()
    failed_steps: int = Metric(
        "total",
        "vllm:metal_failed_steps",
        ("Steps that failed: their requests ended with an error, and all others restarted."),
    ).field()
    #: Tokens that `prefill_seconds` was spent on. Not a metric: vLLM counts prompt tokens itself.
    prefill_rows: int | None = None
    #: None: the step needed no images, or all of them were cached.
    images_encoded: int | None = Metric(
        "counter",
        "vllm:metal_images_encoded",
        ("Images and videos that a vision tower encoded; cached ones are not encoded again."),
    ).field(default=None)
    image_seconds: float | None = Metric(
        "counter", "vllm:metal_image_seconds", "Time spent in vision towers; steps wait for it."
    ).field(default=None)
    #: None: no table is on disk, or all rows of the step were cached.
    table_bytes: int | None = Metric(
        "counter",
        "vllm:metal_table_read_bytes",
        "Bytes of embedding tables that were read from disk, or from the system's file cache.",
    ).field(default=None)


class _Measured(threading.local):
    # Thread-local: each thread builds one step at a time.
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}


_measured = _Measured()


def measure(field: str, value: float = 1) -> None:
    """Adds `value` to a field of the StepMetrics of the step that is being built."""
    _measured.metrics[field] = _measured.metrics.get(field, 0) + value


def take_measured() -> dict[str, float]:
    """Returns and clears the measurements; the runner calls it at the start and end of a step."""
    found, _measured.metrics = _measured.metrics, {}
    return found


class StepsInWords:
    """Averages the steps since the last log line, for the next line."""

    _MEANS: ClassVar = {"host": "host_seconds", "device": "device_seconds"}

    def __init__(self) -> None:
        self._newest: StepMetrics | None = None
        self._sums: dict[str, float] = defaultdict(float)
        self._counts = Counter[str]()

    def add(self, metrics: StepMetrics) -> None:
        self._newest = metrics
        for name in self._MEANS.values():
            if (value := getattr(metrics, name)) is not None:
                self._sums[name] += value
                self._counts[name] += 1

    def words(self) -> list[str]:
        """Returns the parts of the log line; empty if there was no step."""
        if self._newest is None:
            return []
        memory = f"Device memory: {self._newest.device_memory_bytes / _GIB:.2f}"
        if (budget := self._newest.memory_budget_bytes) is not None:
            memory += f" of {budget / _GIB:.2f}"
        times = [
            f"Mean {kind} time of a step: {1e3 * self._sums[name] / number:.1f} ms"
            for kind, name in self._MEANS.items()
            if (number := self._counts[name])
        ]
        return [f"{memory} GiB", *times, f"Failed steps: {self._newest.failed_steps}"]
