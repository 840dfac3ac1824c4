# SPDX-License-Identifier: Apache-2.0
"""Delivers drafts to vLLM with a step's results if pipeline stages run several steps at once."""

# Remove when vLLM takes drafts after the tokens that they follow, and does not wait for them.
# Read against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from vllm_metal.patches.vllm_patches.replacing import replace
from vllm_metal.patches.vllm_patches.step_result import StepResult

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput


def take_drafts_with_results() -> None:
    """Delivers drafts with the results of the step that they follow; call it in the engine."""
    # vLLM's engine asks for drafts as soon as it has sent a step and waits for them, so pipeline
    # parallel could not have a second step in flight. It also passes them to the scheduler before
    # the step's tokens, so the scheduler would put drafts at the positions of those tokens.
    from vllm.v1.engine.core import EngineCore

    replace(EngineCore, "post_step", _unless_staged)
    replace(Scheduler, "update_from_output", _with_drafts)


def _unless_staged(post_step: Callable[..., None], self: Any, model_executed: bool) -> None:
    if self.vllm_config.parallel_config.pipeline_parallel_size == 1:
        post_step(self, model_executed)


def _with_drafts(
    update: Callable[..., dict[int, EngineCoreOutputs]],
    self: Any,
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
) -> dict[int, EngineCoreOutputs]:
    outputs = update(self, scheduler_output, model_runner_output)
    drafts = model_runner_output.drafts if isinstance(model_runner_output, StepResult) else None
    if drafts is None:
        return outputs
    # Drafts of a request that was preempted meanwhile, or is in another step by now, are outdated.
    current = [
        index
        for index, id_ in enumerate(drafts.req_ids)
        if _can_take_drafts(self.requests.get(id_))
    ]
    self.update_draft_token_ids(
        DraftTokenIds(
            [drafts.req_ids[index] for index in current],
            [drafts.draft_token_ids[index] for index in current],
        )
    )
    return outputs


def _can_take_drafts(request: Any) -> bool:
    # Running, and without tokens in a step in flight.
    return (
        request is not None
        and request.status == RequestStatus.RUNNING
        and request.num_in_flight_tokens == 0
    )
