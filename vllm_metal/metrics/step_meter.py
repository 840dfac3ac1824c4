# SPDX-License-Identifier: Apache-2.0
"""Sends a step's figures with its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_metal.device import mlx_device
from vllm_metal.metrics.figures import STEP, StepFigures
from vllm_metal.metrics.step_clock import StepClock, StepTimes
from vllm_metal.metrics.step_rows import StepRows
from vllm_metal.vllm_patches.step_result import StepResult, has_results


class StepMeter:
    """Makes the figures of one engine's steps, whose results come in the order of the steps."""

    def __init__(
        self, clock: StepClock, budget: int | None, num_failures: Callable[[], int]
    ) -> None:
        """
        Args:
            clock: that times the steps.
            budget: bytes that MLX is held to; None: nobody set a limit.
            num_failures: steps that failed since the engine started.
        """
        self._clock = clock
        self._budget = budget
        self._num_failures = num_failures
        self._rows = StepRows()  # of steps whose device time is not known yet

    def measured(
        self, output: AsyncModelRunnerOutput, step: StepTimes, rows: StepRows
    ) -> AsyncModelRunnerOutput:
        """The results of a step that was handed over, which will bring its figures."""
        return _MeasuredOutput(self, output, step, rows)

    def figures(self, step: StepTimes, rows: StepRows, result: StepResult) -> StepFigures:
        """The figures of a step whose results have come just now, with those measured elsewhere.

        Its device time is divided by rows: a row of a prompt and one of an answer that are computed
        together cost the same.
        """
        self._rows += rows
        if result.pool_lost:
            self._clock.drop()
            self._rows = StepRows()
        prefill_seconds = decode_seconds = None
        device_seconds = self._clock.end(step, has_results(result))
        if device_seconds is not None:
            prefill_seconds = device_seconds * self._rows.prefill_share
            decode_seconds = device_seconds - prefill_seconds
            self._rows = StepRows()
        return StepFigures(
            host_seconds=step.host_seconds,
            device_seconds=device_seconds,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            device_memory_bytes=mlx_device.memory_held(),
            memory_budget_bytes=self._budget,
            failed_steps=self._num_failures(),
            **result.figures.get(STEP, {}),
        )


class _MeasuredOutput(AsyncModelRunnerOutput):
    """Results that the device may still be computing."""

    def __init__(
        self, meter: StepMeter, output: AsyncModelRunnerOutput, step: StepTimes, rows: StepRows
    ) -> None:
        self._meter, self._output, self._step, self._rows = meter, output, step, rows

    def get_output(self) -> ModelRunnerOutput:
        result = self._output.get_output()
        assert isinstance(result, StepResult)
        figures = self._meter.figures(self._step, self._rows, result)
        result.figures = {**result.figures, STEP: asdict(figures)}
        return result
