# SPDX-License-Identifier: Apache-2.0
"""Runs steps that may fail, and goes on after those that do."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from vllm.logger import init_logger
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_metal.device import mlx_device
from vllm_metal.metrics.step_clock import StepClock
from vllm_metal.vllm_patches.async_output import AsyncOutput
from vllm_metal.vllm_patches.step_result import StepResult
from vllm_metal.worker.model_runner import ModelRunner
from vllm_metal.worker.step_hooks import NO_HOOKS, StepHooks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput

    from vllm_metal.batch.outputs import StepOutput

logger = init_logger(__name__)

T = TypeVar("T")

#: After so many failed steps in a row the fault is not one request's: the engine stops.
MAX_FAILURES_IN_A_ROW = 3


@dataclass(frozen=True)
class _Step:
    """A step as the scheduler sent it."""

    req_ids: list[str]
    pool: int  # the pool it is computed on, counted from the first


class RecoveringRunner:
    """Makes the runner's calls. When one raises, the step's requests fail and all others restart.

    A failed step leaves arrays that cannot be computed: in the pool, and in whatever else the
    runner keeps on the device. So this class makes a new pool and a new runner, and tells the
    scheduler that no block holds anything. The scheduler may have sent more steps before it hears
    of the failure. They are not computed: it drops their results.
    """

    def __init__(
        self,
        make_runner: Callable[[], ModelRunner],
        hooks: StepHooks = NO_HOOKS,
        clock: StepClock | None = None,
    ) -> None:
        """
        Args:
            make_runner: allocates a pool, and a runner on it.
            hooks: called around each step and each pool's life.
            clock: told of the waits for the step before; None: nobody asks.
        """
        self._make_runner = make_runner
        self._hooks = hooks
        self._clock = clock or StepClock()
        self.num_failures = 0  # steps that failed, ever
        self._runner: ModelRunner | None = None
        self._pool = -1
        self._current_step = _Step([], 0)
        self._unreported_failure: FailedStep | None = None  # the scheduler has not heard of it yet
        self._failures_in_a_row = 0
        self._untold = False  # whether there is a new pool that the scheduler has not heard of
        self._runner = self._new_runner()

    @property
    def awake(self) -> bool:
        """Whether there is a pool."""
        return self._runner is not None

    @property
    def runner(self) -> ModelRunner:
        """The runner on the pool there is.

        Raises:
            RuntimeError: there is none.
        """
        if self._runner is None:
            raise RuntimeError("the engine sleeps and has no KV pool: wake it up first")
        return self._runner

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Builds the forward pass of a step.

        Returns:
            None; where nothing is scheduled, the step's result.
        """
        step = _Step(list(scheduler_output.num_scheduled_tokens), self._pool)
        self._current_step = step
        if self._untold:
            self._untold = False
            self._unreported_failure = FailedStep(self, step, reason=None, pool_lost=True)
        with self._clock.waiting():
            waited = self._attempt(lambda runner: _learn(runner, scheduler_output))
        if waited:
            self._clock.outcome_known()
        self._attempt(lambda runner: runner.settle_leaving(scheduler_output))
        sound = self._unreported_failure is None
        self._call_hook(lambda hooks: hooks.before_step(scheduler_output, sound))
        self.runner.update_requests(scheduler_output)
        self._attempt(lambda runner: runner.update_blocks(scheduler_output))
        if self._unreported_failure is None:
            self._call_hook(lambda hooks: hooks.before_forward())
        if not step.req_ids:
            sound = self._unreported_failure is None
            transfers = self._call_hook(lambda hooks: hooks.after_step(sound))
            if (failure := self._current_failure()) is not None:
                return failure.with_transfers(transfers)
            return replace(EMPTY_MODEL_RUNNER_OUTPUT, kv_connector_output=transfers)
        self._attempt(lambda runner: runner.forward(scheduler_output))
        return None

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncOutput:
        """Samples from the forward pass just built, and hands the step to the device."""
        step, output = self._current_step, None
        if step.pool == self._pool and self._unreported_failure is None:
            self._call_hook(lambda hooks: hooks.before_hand_over())
            output = self._attempt(lambda runner: runner.sample_tokens(grammar_output))
        computed = output is not None
        transfers = self._call_hook(lambda hooks: hooks.after_step(computed))
        if output is not None and step.pool == self._pool:
            return _RecoverableOutput(self, output, step.pool, transfers)
        failure = self._current_failure() or FailedStep(self, step, reason=None)
        return failure.with_transfers(transfers)

    def _attempt(self, call: Callable[[ModelRunner], T]) -> T | None:
        """The call's result; None if it raises, or if a failure is still unreported."""
        if self._unreported_failure is not None:
            return None
        try:
            return call(self.runner)
        except Exception as error:
            self._unreported_failure = self._fail(self._current_step, error)
            return None

    def _call_hook(self, call: Callable[[StepHooks], T]) -> T | None:
        """The hook's result; None if it raises, which fails the step unless one has failed."""
        try:
            return call(self._hooks)
        except Exception as error:
            if self._unreported_failure is None:
                self._unreported_failure = self._fail(self._current_step, error)
            else:
                logger.exception("A hook failed after a step that failed")
            return None

    def _current_failure(self) -> FailedStep | None:
        """The unreported failure, if it is the current step's."""
        failure = self._unreported_failure
        return failure if failure is not None and failure.step is self._current_step else None

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts for the scheduler; None after a failure it has not heard of."""
        return self.runner.take_draft_token_ids() if self._unreported_failure is None else None

    def wait(self) -> None:
        """Blocks until the device has finished every step handed to it."""
        if self._runner is not None:
            self._runner.wait()

    def release_pool(self) -> None:
        """Frees the pool, once nothing on the device uses it."""
        self.wait()
        self._drop_runner(lost=False)

    def close(self) -> None:
        """Drops the pool for good; what is still queued on the device may have failed."""
        try:
            self.wait()
            lost = False
        except Exception:
            lost = True
        self._drop_runner(lost)

    def restore_pool(self) -> None:
        """Makes a new, empty pool where there is none.

        The next step is not computed. It tells the scheduler that no block holds anything, which
        need not have reset its prefix cache, and may have requests that run.
        """
        if self._runner is None:
            self._runner = self._new_runner()
            self._untold = True

    def _new_runner(self) -> ModelRunner:
        runner = self._make_runner()
        self._pool += 1
        self._hooks.pool_made(runner)
        return runner

    def mark_reported(self, failure: FailedStep) -> None:
        """The scheduler is about to hear of a failed step."""
        if failure is self._unreported_failure:
            self._unreported_failure = None

    def result(self, output: StepOutput, pool: int) -> ModelRunnerOutput:
        """A step's results; waits for the device.

        Args:
            output: of a step that was handed to the device.
            pool: the pool it was computed on.
        """
        try:
            result = output.get_output()
        except Exception as error:
            step = _Step([state.req_id for state in output.batch.requests], pool)
            # If its pool is gone already, the failure that took the pool has been reported.
            failure = self._fail(step, error) if pool == self._pool else None
            return (failure or FailedStep(self, step, reason=None)).get_output()
        self._failures_in_a_row = 0
        return result

    def _fail(self, step: _Step, error: Exception) -> FailedStep:
        """Replaces pool and runner after a step raised `error`, which is raised again after too
        many failures in a row."""
        self.num_failures += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row > MAX_FAILURES_IN_A_ROW:
            raise error
        logger.exception(
            "A step failed and its requests with it: %s. All others start again",
            ", ".join(step.req_ids),
        )
        traceback.clear_frames(error.__traceback__)  # they hold the pool
        self._drop_runner(lost=True)
        self._runner = self._new_runner()
        return FailedStep(self, step, f"the step failed: {error}", pool_lost=True)

    def _drop_runner(self, lost: bool) -> None:
        if self._runner is not None:
            self._hooks.before_pool_goes(lost)
        self._runner = None
        mlx_device.give_back()


def _learn(runner: ModelRunner, scheduler_output: SchedulerOutput) -> bool:
    """Whether it took a wait for the newest step."""
    before = runner.num_waits
    runner.learn(scheduler_output)
    return runner.num_waits > before


class _RecoverableOutput(AsyncOutput):
    """Results of a step that the device may still fail to compute."""

    def __init__(
        self,
        runner: RecoveringRunner,
        output: StepOutput,
        pool: int,
        transfers: KVConnectorOutput | None,
    ) -> None:
        self._runner, self._output, self._pool = runner, output, pool
        self._transfers = transfers

    def get_output(self) -> ModelRunnerOutput:
        result = self._runner.result(self._output, self._pool)
        result.kv_connector_output = self._transfers
        return result

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        return self._transfers


class FailedStep(AsyncOutput):
    """Stands for the results of a step that has none."""

    def __init__(
        self, runner: RecoveringRunner, step: _Step, reason: str | None, pool_lost: bool = False
    ) -> None:
        """
        Args:
            runner: told when the scheduler asks for the results.
            step: the step.
            reason: why its requests fail; None: they do not.
            pool_lost: whether the scheduler hears of a new pool, and starts all requests again.
                Without, it has heard, and drops these results.
        """
        self.step = step
        self._runner = runner
        self._reason = reason
        self._pool_lost = pool_lost
        self._transfers: KVConnectorOutput | None = None

    def with_transfers(self, transfers: KVConnectorOutput | None) -> FailedStep:
        """The same; the scheduler hears of transfers as well."""
        self._transfers = transfers
        return self

    def get_output(self) -> ModelRunnerOutput:
        self._runner.mark_reported(self)
        req_ids = self.step.req_ids
        return StepResult(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[[] for _ in req_ids],
            failures=dict.fromkeys(req_ids, self._reason) if self._reason else {},
            pool_lost=self._pool_lost,
            kv_connector_output=self._transfers,
        )

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        return self._transfers
