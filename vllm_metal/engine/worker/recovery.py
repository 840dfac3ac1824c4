# SPDX-License-Identifier: Apache-2.0
"""Decides what becomes of a failed step and its requests, and goes on with a new pool."""

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

#: After so many failures in a row the fault is not one request's: the engine stops.
MAX_FAILURES_IN_A_ROW = 3
#: So many steps with tokens, one after another, end a row of failures. A model that cannot be
#: served fails within a request's first tokens: in prefill, or where its first graph is traced and
#: used. The prefill of the next request must not count for it.
STEPS_THAT_END_A_ROW = 16


class RecoveringRunner:
    """Makes the runner's calls, and goes on with a new pool and a new runner when one raises.

    A failed step leaves arrays that cannot be computed, or hold anything: in the pool, and in
    whatever else the runner keeps on the device. The device tells its errors to whoever asks first
    (see `device.errors`): when a step is built, when an earlier one is read, when blocks are
    copied. So an error may be of any step that the device was given and that is not known to have
    been computed. The rule:

    - All these steps fail, with the step that is being built, and their requests with them. Nothing
      that they computed is returned or kept.
    - All other requests start again, on a pool that holds nothing.

    Where the runner cannot take in a request, the fault is that request's: it alone fails, and all
    others start again. Its blocks count as computed for whoever begins with the same text, so
    nothing in the pool may be found any more.

    The scheduler hears of it with the next result it asks for. It may have sent more steps before
    it does. They are not computed: it drops their results.
    """

    def __init__(
        self,
        make_runner: Callable[[Graphs], ModelRunner],
        hooks: StepHooks = NO_HOOKS,
        most_failures: int = MAX_FAILURES_IN_A_ROW,
    ) -> None:
        """
        Args:
            make_runner: allocates a pool, and a runner on it that builds forwards as it is told.
            hooks: told of each pool's life, and of steps that are known to be computed.
            most_failures: failed steps in a row, after which the next one is final; 0: nothing that
                fails may be made good, as other ranks compute the same steps.
        """
        self._make_runner = make_runner
        self._hooks = hooks
        self._most_failures = most_failures
        self.num_failures = 0  # ever
        self._graphs = Graphs()
        self._num_by_graph = 0  # forwards of graphs that are known to have been computed
        self._runner: ModelRunner | None = None
        self._pool = -1
        self._building: Step | None = None  # the device has not been given it yet
        self._in_flight: list[Step] = []  # not known to have been computed, the newest last
        #: By request id, why those fail that a lost pool takes along. None: the scheduler has heard
        #: of each loss.
        self._untold: dict[str, str] | None = None
        self._failures_in_a_row = self._steps_since = 0
        self._gave_up: Exception | None = None
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
        if self._gave_up is not None:
            raise self._gave_up
        if self._runner is None:
            raise RuntimeError("the engine sleeps and has no KV pool: call wake_up first")
        return self._runner

    def warm_up(self, steps: Callable[[ModelRunner], T]) -> T:
        """What steps give that run before there are requests, and once more where they fail.

        Where a graph compiled by MLX is what fails, the second attempt makes none.

        Args:
            steps: runs them; they leave the runner and its pool as they were.

        Raises:
            Exception: what failed in the second attempt.
        """
        try:
            return self._run_to_the_end(steps)
        except Exception as error:
            self._fail(error)
            self._untold = None  # no request has lost anything
            return self._run_to_the_end(steps)

    def _run_to_the_end(self, steps: Callable[[ModelRunner], T]) -> T:
        found = steps(self.runner)
        if (error := self._finish()) is not None:
            raise error
        return found

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Builds the forward pass of a step.

        Returns:
            None; where nothing is scheduled, the step's result.
        """
        step = self._building = Step(scheduler_output, self._pool)
        self._attempt(lambda runner: runner.execute(step))
        # Whatever failed, and while the scheduler has not heard of it, its news are taken.
        while not step.requests_told:
            self._in_any_case(lambda runner: runner.update_states(step, sound=False))
        if step.req_ids:
            return None
        self._in_any_case(lambda runner: runner.end_step(step, computed=False))
        self._building = None
        if self._untold is not None:
            return LateOutput(partial(self._result, step, None), step.transfers)
        return StepResult([], {}, kv_connector_output=step.transfers, figures=step.figures)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> AsyncModelRunnerOutput:
        """Samples from the forward pass just built, and hands the step to the device."""
        step, output = self._building, None
        assert step is not None
        if step.pool == self._pool:
            output = self._attempt(lambda runner: runner.finish(step, grammar_output))
        self._in_any_case(lambda runner: runner.end_step(step, computed=False))
        self._building = None
        if output is None or step.pool != self._pool:
            return LateOutput(partial(self._result, step, None), step.transfers)
        step.num_by_graph = self._graphs.num_built
        self._in_flight.append(step)
        return LateOutput(partial(self._result, step, output), step.transfers)

    def _attempt(self, call: Callable[[ModelRunner], T]) -> T | None:
        """The call's result; None if it raises, or if the pool is not what the scheduler thinks."""
        return self._in_any_case(call) if self._untold is None else None

    def _in_any_case(self, call: Callable[[ModelRunner], T]) -> T | None:
        """Makes a call also after a failure; it does nothing where it was made before."""
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
        """A failure, unless the scheduler is to hear of one anyway: then a hook raised."""
        if self._untold is None:
            self._fail(error)
        else:
            logger.error("A hook failed after a step that failed", exc_info=error)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts for the scheduler; None after a failure it has not heard of."""
        return self._attempt(lambda runner: runner.take_draft_token_ids())

    def _result(self, step: Step, output: StepOutput | None) -> StepResult:
        """What the scheduler gets of a step, whatever became of it; waits for it.

        Args:
            step: has what is to be told of transfers.
            output: what the device was given; None: nothing.
        """
        result = None if output is None else self._computed(step, output)
        if result is None:
            result = self._no_result(step)
        result.kv_connector_output = step.transfers
        result.figures = {**result.figures, **step.figures}
        return result

    def _computed(self, step: Step, output: StepOutput) -> StepResult | None:
        """The results of a step that was handed to the device; None: it, or its pool, is lost."""
        if step.pool != self._pool:
            return None
        try:
            result = output.get_output()
            if not output.checked:
                errors.check()
        except Exception as error:
            self._fail(error)
            return None
        if output.always_waits or has_results(result):  # else nobody waited for the step
            self._known_computed(step)
        return result if step.pool == self._pool else None

    def _no_result(self, step: Step) -> StepResult:
        """The results of a step that has none; the first after a loss tell the scheduler of it."""
        if self._gave_up is not None:
            raise self._gave_up
        loss, self._untold = self._untold, None
        return StepResult(
            req_ids=step.req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(step.req_ids)},
            sampled_token_ids=[[] for _ in step.req_ids],
            failures=loss or {},
            pool_lost=loss is not None,
        )

    def _known_computed(self, step: Step) -> None:
        """A step was computed, so those before it were as well."""
        self._steps_since += 1
        if self._steps_since >= STEPS_THAT_END_A_ROW:
            self._failures_in_a_row = 0
        if step in self._in_flight:
            del self._in_flight[: self._in_flight.index(step) + 1]
            self._num_by_graph = step.num_by_graph
            num_left = len(self._in_flight)
            self._tell_computed(num_left)

    def _tell_computed(self, num_left: int) -> None:
        try:
            self._hooks.steps_computed(num_left)
        except Exception as error:
            self._fail_of_hook(error)

    def wait(self) -> None:
        """Blocks until the device has finished every step handed to it; one may fail."""
        if (error := self._finish()) is not None:
            self._fail(error)

    def _finish(self) -> Exception | None:
        """Blocks likewise, and returns what failed."""
        if self._runner is None:
            return None
        try:
            self._runner.wait()
            errors.wait()
        except Exception as error:
            return error
        self._in_flight.clear()
        self._num_by_graph = self._graphs.num_built
        self._tell_computed(0)
        return None

    def release_pool(self) -> None:
        """Frees the pool, once nothing on the device uses it."""
        error = self._finish()
        if error is not None:
            self._lose_pool(error)
        else:
            self._drop_runner(lost=False)

    def close(self) -> None:
        """Drops the pool for good; what is still queued on the device may have failed."""
        self._drop_runner(lost=self._finish() is not None)

    def restore_pool(self) -> None:
        """Makes a new, empty pool where there is none.

        The next step is not computed. It tells the scheduler that no block holds anything, which
        need not have reset its prefix cache, and may have requests that run.
        """
        if self._runner is None:
            self._runner = self._new_runner()
            self._untold = self._untold or {}

    def _new_runner(self) -> ModelRunner:
        runner = self._make_runner(self._graphs)
        self._pool += 1
        self._hooks.pool_made(runner)
        return runner

    def _fail(self, error: Exception) -> None:
        """Replaces pool and runner; raises the error where it is one too many in a row."""
        self._lose_pool(error)
        self._runner = self._new_runner()

    def _refuse(self, errors: dict[str, Exception]) -> None:
        """Fails requests that could not be taken in, and has all others start again.

        These are no failures in a row: the next request need not be like them. Steps that were
        sent before the scheduler has heard of a loss name requests that are gone; they are told.
        """
        told = self._untold or {}
        failures = {
            req_id: f"the request could not be added: {type(error).__name__}: {error}"
            for req_id, error in errors.items()
            if req_id not in told
        }
        if not failures:
            return
        for req_id in failures:
            logger.error(
                "Request %s could not be added and fails. All others restart",
                req_id,
                exc_info=errors[req_id],
            )
            traceback.clear_frames(errors[req_id].__traceback__)  # they hold the pool
        if self._untold is None:
            self.num_failures += 1
            self._drop_runner(lost=True)
            self._runner = self._new_runner()
        self._untold = told | failures

    def _lose_pool(self, error: Exception) -> None:
        """Drops pool and runner, and notes what the scheduler must hear."""
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
            self._gave_up = error
            raise error
        logger.error(
            "A step failed, and its requests with it: %s. All others restart",
            ", ".join(req_ids) or "none",
            exc_info=error,
        )
        self._forgo_graphs()
        failures = dict.fromkeys(req_ids, f"the step failed: {error}")
        self._untold = failures | (self._untold or {})

    def _forgo_graphs(self) -> None:
        """Forwards are built without graphs from now on, if one may be what failed.

        MLX's fused kernels of a graph are compiled, and run, when the device is given the step.
        """
        if self._graphs.allowed and self._graphs.num_built > self._num_by_graph:
            self._graphs.allowed = False
            logger.warning(
                "A step that used a graph compiled by MLX failed. From now on Python builds "
                "the graph of each step"
            )

    def _drop_runner(self, lost: bool) -> None:
        if self._runner is not None:
            self._hooks.before_pool_goes(lost)
            self._pool += lost  # what is in flight has no results
        self._runner = None
        self._in_flight.clear()
        mlx_device.give_back()
