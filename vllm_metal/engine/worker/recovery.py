# SPDX-License-Identifier: Apache-2.0
"""Handles failed steps: fails their requests and continues on a new pool."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_metal.device import errors, mlx_device
from vllm_metal.engine.batch.per_request_state import RequestsRefused
from vllm_metal.engine.models.compiled import Graphs
from vllm_metal.engine.worker.model_runner import ModelRunner
from vllm_metal.engine.worker.results import LateOutput, Step
from vllm_metal.engine.worker.step_hooks import NO_HOOKS, StepHooks
from vllm_metal.patches.vllm_patches.step_result import StepResult, has_results

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds

    from vllm_metal.engine.batch.outputs import StepOutput

logger = init_logger(__name__)

T = TypeVar("T")

#: After more failures in a row the fault is not one request's, and the engine stops.
MAX_FAILURES_IN_A_ROW = 3
#: Steps with tokens in a row that reset the count of failures. A model that cannot be served fails
#: within a request's first tokens: in prefill, or where its first graph is traced and used. The
#: prefill of the next request alone must not reset the count.
STEPS_THAT_END_A_ROW = 16


class RecoveringRunner:
    """Calls the runner, and replaces pool and runner if a call raises.

    - The step being built fails, as do all submitted steps not known to be computed; so do their
      requests. None of these steps' results is returned or kept.
    - All other requests restart, on an empty pool.
    - A request that the runner cannot add fails alone; all others restart.
    """

    # A failed step leaves arrays that cannot be computed, or have any content: in the pool, and in
    # whatever else the runner keeps on the device. The device reports an error to whoever asks
    # first (see `device.errors`): when a step is built, when an earlier one is read, when blocks
    # are copied. So an error may belong to any step in flight.
    # The blocks of a request that could not be added count as computed for requests with the same
    # prefix, so nothing in the pool may be found any more.
    # The scheduler learns of a failure with the next result that it requests. Steps that it sends
    # before then are not computed: it drops their results.

    def __init__(
        self,
        make_runner: Callable[[Graphs], ModelRunner],
        hooks: StepHooks = NO_HOOKS,
        most_failures: int = MAX_FAILURES_IN_A_ROW,
    ) -> None:
        """
        Args:
            make_runner: allocates a pool, and a runner on it that may use compiled graphs.
            hooks: notified when a pool is made or dropped, and when steps are known to be computed.
            most_failures: failed steps in a row that are tolerated. 0 if failures cannot be
                recovered from, because other ranks compute the same steps.
        """
        self._make_runner = make_runner
        self._hooks = hooks
        self._most_failures = most_failures
        self.num_failures = 0  # in total
        self._graphs = Graphs()
        self._num_by_graph = 0  # forwards of graphs that are known to have been computed
        self._runner: ModelRunner | None = None
        self._pool = -1
        self._building: Step | None = None  # not yet submitted to the device
        self._in_flight: list[Step] = []  # not known to have been computed, newest last
        #: Maps requests that a lost pool fails to the reason. None if the scheduler knows of every
        #: loss.
        self._unreported: dict[str, str] | None = None
        self._failures_in_a_row = self._steps_since = 0
        self._final_error: Exception | None = None
        self._runner = self._new_runner()

    @property
    def awake(self) -> bool:
        """Whether there is a pool."""
        return self._runner is not None

    @property
    def runner(self) -> ModelRunner:
        """The runner on the current pool; raises RuntimeError without one."""
        if self._final_error is not None:
            raise self._final_error
        if self._runner is None:
            raise RuntimeError("the engine sleeps and has no KV pool: call wake_up first")
        return self._runner

    def warm_up(self, steps: Callable[[ModelRunner], T]) -> T:
        """Runs steps before there are requests, and once more if they fail.

        `steps` leave the runner and its pool as they were. Raises the second attempt's error.
        """
        # `_fail` disables graphs if a graph compiled by MLX may have failed.
        try:
            return self._run_to_completion(steps)
        except Exception as error:
            self._fail(error)
            self._unreported = None  # no request has lost anything
            return self._run_to_completion(steps)

    def _run_to_completion(self, steps: Callable[[ModelRunner], T]) -> T:
        found = steps(self.runner)
        if (error := self._finish()) is not None:
            raise error
        return found

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Builds the forward pass of a step; returns a result only if nothing is scheduled."""
        step = self._building = Step(scheduler_output, self._pool)
        self._attempt(lambda runner: runner.execute(step))
        # The step's updates must be applied whatever failed, also before the scheduler knows.
        while not step.requests_told:
            self._call_always(lambda runner: runner.update_states(step, pool_valid=False))
        if step.req_ids:
            return None
        self._call_always(lambda runner: runner.end_step(step, computed=False))
        self._building = None
        if self._unreported is not None:
            return LateOutput(partial(self._result, step, None), step.transfers)
        return StepResult([], {}, kv_connector_output=step.transfers, metrics=step.metrics)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncModelRunnerOutput:
        """Samples from the forward pass just built, and submits the step to the device."""
        step, output = self._building, None
        assert step is not None
        if step.pool == self._pool:
            output = self._attempt(lambda runner: runner.finish(step, grammar_output))
        self._call_always(lambda runner: runner.end_step(step, computed=False))
        self._building = None
        if output is None or step.pool != self._pool:
            return LateOutput(partial(self._result, step, None), step.transfers)
        step.num_by_graph = self._graphs.num_built
        self._in_flight.append(step)
        return LateOutput(partial(self._result, step, output), step.transfers)

    def _attempt(self, call: Callable[[ModelRunner], T]) -> T | None:
        # Skipped if the scheduler does not know yet that the pool was lost.
        return self._call_always(call) if self._unreported is None else None

    def _call_always(self, call: Callable[[ModelRunner], T]) -> T | None:
        # For calls that must be made after a failure, too; the runner skips repeated ones.
        runner = self.runner
        try:
            return call(runner)
        except RequestsRefused as refused:
            if not self._most_failures:
                self._fail(refused)
            self._refuse(refused.errors)
        except Exception as error:
            self._fail_of_hook(error)
        return None

    def _fail_of_hook(self, error: Exception) -> None:
        # After a failure that the scheduler is yet to learn of, this error must come from a hook.
        if self._unreported is None:
            self._fail(error)
        else:
            logger.error("A hook failed after a failed step", exc_info=error)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Returns drafts for the scheduler; None after a failure not yet reported to it."""
        return self._attempt(lambda runner: runner.take_draft_token_ids())

    def _result(self, step: Step, output: StepOutput | None) -> StepResult:
        """Waits for a step and returns its result; `output` is None if it was not submitted."""
        result = None if output is None else self._computed(step, output)
        if result is None:
            result = self._no_result(step)
        result.kv_connector_output = step.transfers
        result.metrics = {**result.metrics, **step.metrics}
        return result

    def _computed(self, step: Step, output: StepOutput) -> StepResult | None:
        # None if the step or its pool is lost.
        if step.pool != self._pool:
            return None
        try:
            result = output.get_output()
            if not output.checked:
                errors.check()
        except Exception as error:
            self._fail(error)
            return None
        if output.always_waits or has_results(result):  # otherwise nobody waited for the step
            self._known_computed(step)
        return result if step.pool == self._pool else None

    def _no_result(self, step: Step) -> StepResult:
        # The first result after a loss reports it to the scheduler.
        if self._final_error is not None:
            raise self._final_error
        loss, self._unreported = self._unreported, None
        return StepResult(
            req_ids=step.req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(step.req_ids)},
            sampled_token_ids=[[] for _ in step.req_ids],
            failures=loss or {},
            pool_lost=loss is not None,
        )

    def _known_computed(self, step: Step) -> None:
        # The device computes in order, so earlier steps were computed as well.
        self._steps_since += 1
        if self._steps_since >= STEPS_THAT_END_A_ROW:
            self._failures_in_a_row = 0
        if step in self._in_flight:
            del self._in_flight[: self._in_flight.index(step) + 1]
            self._num_by_graph = step.num_by_graph
            num_left = len(self._in_flight)
            self._notify_computed(num_left)

    def _notify_computed(self, num_left: int) -> None:
        try:
            self._hooks.steps_computed(num_left)
        except Exception as error:
            self._fail_of_hook(error)

    def wait(self) -> None:
        """Blocks until the device has finished every submitted step; recovers if one failed."""
        if (error := self._finish()) is not None:
            self._fail(error)

    def _finish(self) -> Exception | None:
        # Returns the error, if any.
        if self._runner is None:
            return None
        try:
            self._runner.wait()
            errors.wait()
        except Exception as error:
            return error
        self._in_flight.clear()
        self._num_by_graph = self._graphs.num_built
        self._notify_computed(0)
        return None

    def release_pool(self) -> None:
        """Frees the pool once nothing on the device uses it."""
        error = self._finish()
        if error is not None:
            self._lose_pool(error)
        else:
            self._drop_runner(lost=False)

    def close(self) -> None:
        """Waits for submitted steps, ignoring their errors, and drops the pool for good."""
        self._drop_runner(lost=self._finish() is not None)

    def restore_pool(self) -> None:
        """Makes a new, empty pool if there is none."""
        if self._runner is None:
            self._runner = self._new_runner()
            # The next step is not computed: it tells the scheduler that all blocks are empty. The
            # scheduler may not have reset its prefix cache, and may have running requests.
            self._unreported = self._unreported or {}

    def _new_runner(self) -> ModelRunner:
        runner = self._make_runner(self._graphs)
        self._pool += 1
        self._hooks.pool_made(runner)
        return runner

    def _fail(self, error: Exception) -> None:
        """Replaces pool and runner, or raises the error if there were too many in a row."""
        self._lose_pool(error)
        self._runner = self._new_runner()

    def _refuse(self, errors: dict[str, Exception]) -> None:
        # Not counted as failures in a row: the next request need not be like these. Steps sent
        # before the scheduler learned of a loss may name requests that are gone: those are known.
        unreported = self._unreported or {}
        failures = {
            req_id: f"the request could not be added: {type(error).__name__}: {error}"
            for req_id, error in errors.items()
            if req_id not in unreported
        }
        if not failures:
            return
        for req_id in failures:
            logger.error(
                "Request %s could not be added and fails. All other requests restart",
                req_id,
                exc_info=errors[req_id],
            )
            traceback.clear_frames(errors[req_id].__traceback__)  # they hold the pool
        if self._unreported is None:
            self.num_failures += 1
            self._drop_runner(lost=True)
            self._runner = self._new_runner()
        self._unreported = unreported | failures

    def _lose_pool(self, error: Exception) -> None:
        """Drops pool and runner, and records the failures to report to the scheduler."""
        steps = list(self._in_flight)
        if self._building is not None and self._building.pool == self._pool:
            steps.append(self._building)
        req_ids = list(dict.fromkeys(req_id for step in steps for req_id in step.req_ids))
        self.num_failures += 1
        self._failures_in_a_row += 1
        self._steps_since = 0
        traceback.clear_frames(error.__traceback__)  # they hold the pool
        self._drop_runner(lost=True)
        if self._failures_in_a_row > self._most_failures:
            self._final_error = error
            raise error
        logger.error(
            "A step failed, so its requests fail: %s. All other requests restart",
            ", ".join(req_ids) or "none",
            exc_info=error,
        )
        self._disable_graphs()
        failures = dict.fromkeys(req_ids, f"the step failed: {error}")
        self._unreported = failures | (self._unreported or {})

    def _disable_graphs(self) -> None:
        # MLX compiles and runs the fused kernels of a graph when the device gets the step, so a
        # graph is suspect if a step in flight used one.
        if self._graphs.allowed and self._graphs.num_built > self._num_by_graph:
            self._graphs.allowed = False
            logger.warning(
                "A step that used a graph compiled by MLX failed. From now on Python builds "
                "the graph of each step"
            )

    def _drop_runner(self, lost: bool) -> None:
        if self._runner is not None:
            self._hooks.before_pool_goes(lost)
            self._pool += lost  # steps in flight on another number have no results
        self._runner = None
        self._in_flight.clear()
        mlx_device.give_back()
