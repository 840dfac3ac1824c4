# SPDX-License-Identifier: Apache-2.0
"""StepFigures: what a step adds to an engine's figures, and which metric shows each of them."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_metal.metrics.metric import metric

#: Upper bounds in seconds: from a small model's step to a step at which streams stall.
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_BUSY = "Device time of steps, by what its rows were for: prompts (prefill), answers (decode)."


@dataclass(frozen=True)
class StepFigures:
    """One step that was handed to the device, and the engine after it; None: not known."""

    host_seconds: float = metric(
        "histogram",
        "vllm:metal_step_host_seconds",
        "Time that a step took the engine's host, before the device had all of it.",
        buckets=_BUCKETS,
    )
    #: The most it may have taken; None: no token told when the step was over.
    device_seconds: float | None = metric(
        "histogram",
        "vllm:metal_step_device_seconds",
        "Time from a step's hand-over, or the end of the step before, until its tokens came.",
        buckets=_BUCKETS,
    )
    #: The two parts of `device_seconds`.
    prefill_seconds: float | None = metric(
        "counter", "vllm:metal_device_seconds", _BUSY, label=("kind", "prefill")
    )
    decode_seconds: float | None = metric(
        "counter", "vllm:metal_device_seconds", _BUSY, label=("kind", "decode")
    )
    device_memory_bytes: int = metric(
        "gauge",
        "vllm:metal_device_memory_bytes",
        "Device memory that MLX holds: live arrays, and freed buffers it keeps to use again.",
    )
    #: None: nobody set a limit.
    memory_budget_bytes: int | None = metric(
        "gauge", "vllm:metal_memory_budget_bytes", "Device memory that MLX is held to."
    )
    failed_steps: int = metric(
        "total",
        "vllm:metal_failed_steps",
        "Steps that failed: their requests ended with an error, and all others started again.",
    )
