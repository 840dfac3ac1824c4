# SPDX-License-Identifier: Apache-2.0
"""Steps that may fail without taking the engine along."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from vllm.logger import init_logger
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_metal.device import mlx_device
from vllm_metal.vllm_patches.async_output import AsyncOutput
from vllm_metal.vllm_patches.step_result import StepResult
from vllm_metal.worker.model_runner import ModelRunner

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds

    from vllm_metal.batch.outputs import StepOutput

logger = init_logger(__name__)

T = TypeVar("T")

#: So many failed steps with no good one between are no accident of one request any more.
MAX_FAILURES_IN_A_ROW = 3


class RecoveringRunner:
    """Runs the runner's steps; where one raises, its requests fail and the rest start again.

    A failed step leaves arrays that cannot be computed: in the pool, and in whatever else the
    runner keeps on the device. So runner and pool are made anew, and the scheduler is told that no
    block holds anything. Until it has heard, what it sends is not computed: it will drop the
    outcome of those steps unseen.
    """

    def __init__(self, make_runner: Callable[[], ModelRunner]) -> None:
        """
        Args:
            make_runner: allocates a pool, and a runner on it.
        """
        self._make_runner = make_runner
        self._runner: ModelRunner | None = make_runner()
        self._pool = 0  # which one it is, counted from the first
        self._unreported_failure: FailedStep | None = None  # of which the scheduler has not heard
        # Requests of the step at hand, and the pool it was laid out on.
        self._current_step: tuple[list[str], int] = ([], 0)
        self._failures_in_a_row = 0

    @property
    def awake(self) -> bool:
        """Whether there is a pool."""
        return self._runner is not None

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the engine sleeps and has no KV pool: wake it up first")
        return self._runner

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Lays a step out.

        Returns:
            None, or the outcome of a step in which nothing was scheduled.
        """
        req_ids = list(scheduler_output.num_scheduled_tokens)
        self._current_step = (req_ids, self._pool)
        self._attempt(lambda runner: runner.learn())
        self.runner.update_requests(scheduler_output)
        if not req_ids:
            return self._current_failure() or EMPTY_MODEL_RUNNER_OUTPUT
        self._attempt(lambda runner: runner.forward(scheduler_output))
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncModelRunnerOutput:
        """Samples from the step laid out, and hands it to the device."""
        req_ids, pool = self._current_step
        if pool == self._pool:
            output = self._attempt(lambda runner: runner.sample_tokens(grammar_output))
            if output is not None:
                return _RecoverableOutput(self, output, pool)
        return self._current_failure() or FailedStep(self, req_ids, reason=None)

    def _attempt(self, call: Callable[[ModelRunner], T]) -> T | None:
        """The call's result; None where it fails, or must not be made after a failure."""
        if self._unreported_failure is not None:
            return None
        try:
            return call(self.runner)
        except Exception as error:
            self._unreported_failure = self._fail(self._current_step[0], error)
            return None

    def _current_failure(self) -> FailedStep | None:
        """The failure of the step at hand."""
        untold = self._unreported_failure
        return untold if untold is not None and untold.req_ids is self._current_step[0] else None

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.runner.take_draft_token_ids() if self._unreported_failure is None else None

    def wait(self) -> None:
        """Blocks until the device has finished every step handed to it."""
        if self._runner is not None:
            self._runner.wait()

    def release_pool(self) -> None:
        """Lets go of the pool, once nothing on the device uses it."""
        self.wait()
        self._drop_runner()

    def restore_pool(self) -> None:
        """A pool again, and empty, where there is none."""
        if self._runner is None:
            self._runner = self._make_runner()
            self._pool += 1

    def mark_reported(self, step: FailedStep) -> None:
        """The scheduler is about to hear of a failed step."""
        if step is self._unreported_failure:
            self._unreported_failure = None

    def result(self, output: StepOutput, pool: int) -> ModelRunnerOutput:
        """A step's results; waits for the device.

        Args:
            output: of a step that was handed over.
            pool: which one it was laid out on.
        """
        try:
            result = output.get_output()
        except Exception as error:
            req_ids = [state.req_id for state in output.batch.requests]
            # After the pool it was laid out on the step itself is no news any more.
            failed = self._fail(req_ids, error) if pool == self._pool else None
            return (failed or FailedStep(self, req_ids, reason=None)).get_output()
        self._failures_in_a_row = 0
        return result

    def _fail(self, req_ids: list[str], error: Exception) -> FailedStep:
        """What to tell the scheduler of a step that raised; the pool is another afterwards."""
        self._failures_in_a_row += 1
        if self._failures_in_a_row > MAX_FAILURES_IN_A_ROW:
            raise error
        logger.exception(
            "A step failed and its requests with it: %s. All others start again", ", ".join(req_ids)
        )
        traceback.clear_frames(error.__traceback__)  # they hold the pool
        self._drop_runner()
        self.restore_pool()
        return FailedStep(self, req_ids, f"the step failed: {error}")

    def _drop_runner(self) -> None:
        self._runner = None
        mlx_device.give_back()


class _RecoverableOutput(AsyncOutput):
    """A step's results on their way, which may yet fail to come."""

    def __init__(self, steps: RecoveringRunner, output: StepOutput, pool: int) -> None:
        self._steps, self._output, self._pool = steps, output, pool

    def get_output(self) -> ModelRunnerOutput:
        return self._steps.result(self._output, self._pool)


class FailedStep(AsyncOutput):
    """Stands for a step without results."""

    def __init__(self, steps: RecoveringRunner, req_ids: list[str], reason: str | None) -> None:
        """
        Args:
            steps: told when the scheduler asks.
            req_ids: the step's requests.
            reason: why they fail; None: the scheduler will drop this outcome unseen.
        """
        self.req_ids = req_ids
        self._steps = steps
        self._reason = reason

    def get_output(self) -> ModelRunnerOutput:
        self._steps.mark_reported(self)
        return StepResult(
            req_ids=self.req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(self.req_ids)},
            sampled_token_ids=[[] for _ in self.req_ids],
            failures=dict.fromkeys(self.req_ids, self._reason) if self._reason else {},
            pool_lost=self._reason is not None,
        )
