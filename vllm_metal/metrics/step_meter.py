# SPDX-License-Identifier: Apache-2.0
"""Adds a step's metrics to its results: times, and tokens by purpose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_metal.device import mlx_device
from vllm_metal.metrics.step_clock import StepClock, StepTimes
from vllm_metal.metrics.step_metrics import STEP, StepMetrics
from vllm_metal.patches.vllm_patches.step_result import StepResult, has_results

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import AsyncModelRunnerOutput


@dataclass(frozen=True)
class StepRows:
    """Numbers of tokens that forward passes computed, by purpose."""

    prefill: int = 0  # prompt tokens, and those recomputed after preemption
    decode: int = 0  # newest output tokens, and drafts to verify

    @staticmethod
    def of(step: SchedulerOutput) -> StepRows:
        """Counts the tokens of a step after its forward was built."""
        cached = step.scheduled_cached_reqs
        outputs = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        # Tokens reserved for drafts that were never made.
        left_out = step.num_invalid_spec_tokens or {}
        prefill = decode = 0
        for req_id, rows in step.num_scheduled_tokens.items():
            drafts = len(step.scheduled_spec_decode_tokens.get(req_id, ()))
            if outputs.get(req_id, 0) > 0 and rows == 1 + drafts:
                decode += rows - left_out.get(req_id, 0)
            else:
                prefill += rows
        return StepRows(prefill, decode)

    def __add__(self, other: StepRows) -> StepRows:
        return StepRows(self.prefill + other.prefill, self.decode + other.decode)

    @property
    def prefill_share(self) -> float:
        """Prompts' share of all tokens; 0 if there are none."""
        return self.prefill / total if (total := self.prefill + self.decode) else 0.0


class StepMeter:
    """Makes the metrics of one engine's steps, whose results come in the order of the steps."""

    def __init__(
        self, clock: StepClock, budget: int | None, num_failures: Callable[[], int]
    ) -> None:
        """budget: MLX's memory limit in bytes, None if unlimited.

        num_failures: returns the number of failed steps since the engine started.
        """
        self._clock = clock
        self._budget = budget
        self._num_failures = num_failures
        self._rows = StepRows()  # rows of steps whose device time is still unknown

    def measured(
        self, output: AsyncModelRunnerOutput, step: StepTimes, rows: StepRows
    ) -> StepResult:
        """Waits for the device, and returns a submitted step's results with its metrics."""
        result = output.get_output()
        assert isinstance(result, StepResult)
        self._rows += rows
        if result.pool_lost:
            self._clock.drop()
            self._rows = StepRows()
        prefill_seconds = decode_seconds = prefill_rows = None
        device_seconds = self._clock.end(step, has_results(result))
        if device_seconds is not None:
            # In one forward pass, a prompt token and an output token cost the same.
            prefill_seconds = device_seconds * self._rows.prefill_share
            decode_seconds = device_seconds - prefill_seconds
            prefill_rows = self._rows.prefill
            self._rows = StepRows()
        metrics = StepMetrics(
            host_seconds=step.host_seconds,
            device_seconds=device_seconds,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            device_memory_bytes=mlx_device.memory_held(),
            memory_budget_bytes=self._budget,
            failed_steps=self._num_failures(),
            prefill_rows=prefill_rows,
            **result.metrics.get(STEP, {}),
        )
        result.metrics = {**result.metrics, STEP: {**vars(metrics)}}
        return result
