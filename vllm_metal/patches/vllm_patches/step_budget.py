# SPDX-License-Identifier: Apache-2.0
"""Bounds vLLM's steps by time, so that a prefill does not hold up streams that decode."""

# Remove when vLLM limits the time of a step. Read against vLLM 0.33.

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_metal.patches.vllm_patches.chunk_lengths import ChunkLengths, StepWork
from vllm_metal.patches.vllm_patches.replacing import replace
from vllm_metal.patches.vllm_patches.scheduler import next_image
from vllm_metal.patches.vllm_patches.step_result import StepResult
from vllm_metal.settings.additional_config import AdditionalConfig

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_SHORTEST = 16  # tokens of a chunk, whatever they cost, so that a prompt always progresses
_IN_FLIGHT = 8  # steps that are remembered until their results arrive; vLLM has two at most


def bound_steps() -> None:
    """Makes vLLM's schedulers bound the time of steps; call it in the process that schedules."""
    replace(Scheduler, "schedule", _limited)
    replace(Scheduler, "update_from_output", _measured)


@dataclass(frozen=True)
class _Step:
    output: SchedulerOutput
    work: StepWork
    began: float  # when it was scheduled, by the clock


class _StepBudget:
    """One scheduler's bound on the time of steps, `max_step_ms` of --additional-config."""

    # vLLM only counts a step's tokens. If a streamed request decodes while others are to be
    # prefilled, a step gets all decode rows and as many prefill tokens as `ChunkLengths` allows.
    # vLLM's own limits still apply.
    # A step's time runs from the end of the previous step to its own. The host only sees the end of
    # a step that samples; steps that do not are measured together with the one after them.

    def __init__(self, scheduler: Any, max_step_ms: float) -> None:
        self._scheduler = scheduler
        # vLLM never schedules fewer tokens than all drafts of a request that starts with its last.
        shortest = max(_SHORTEST, 1 + scheduler.num_spec_tokens)
        self._lengths = ChunkLengths(max_step_ms / 1e3, shortest)
        self._in_flight: deque[_Step] = deque(maxlen=_IN_FLIGHT)
        self._unseen = StepWork()  # work of steps since the last one with a visible end
        self._last_end = 0.0  # end of that step, plus the time with nothing in flight since
        self._last_results = 0.0  # when results last arrived

    def schedule(self, schedule: Callable[[], SchedulerOutput]) -> SchedulerOutput:
        scheduler, began = self._scheduler, time.perf_counter()
        waiting = scheduler.waiting or scheduler.kv_holding_waiting
        if not (waiting or scheduler._inflight_prefills):
            output = schedule()
            self._remember(output, StepWork(output.total_num_scheduled_tokens), began)
            return output
        decoding = [request for request in scheduler.running if not request.is_prefill_chunk]
        most = scheduler.max_num_scheduled_tokens
        try:
            scheduler.max_num_scheduled_tokens = min(most, self._most_tokens(decoding) or most)
            output = schedule()
        finally:
            scheduler.max_num_scheduled_tokens = most
        self._remember(output, self._work(output, {each.request_id for each in decoding}), began)
        return output

    def _most_tokens(self, decoding: list[Any]) -> int | None:
        # None leaves vLLM's limit.
        scheduler = self._scheduler
        if not any(map(_is_streamed, decoding)) or scheduler._pause_state == PauseState.PAUSED_ALL:
            return None
        rows = sum(map(_rows_of, decoding))
        chunk = self._lengths.limit(rows, self._next_context()) if rows else None
        if chunk is None:
            return None
        # vLLM schedules in the order of this list, and a chunk must not take a decode's tokens.
        scheduler.running.sort(key=lambda request: request.is_prefill_chunk)
        return rows + max(chunk, self._next_image())

    def _next_prefill(self) -> Any:
        # An estimate: the scheduler may still choose another request, or none.
        scheduler = self._scheduler
        for request in scheduler.running:
            if request.is_prefill_chunk:
                return request
        queue = scheduler.kv_holding_waiting or scheduler.waiting
        return queue.peek_request() if queue else None

    def _next_context(self) -> int:
        request = self._next_prefill()
        return int(request.num_computed_tokens) if request else 0

    def _next_image(self) -> int:
        # An image at the start of the next chunk must not be cut.
        request = self._next_prefill()
        start = request.num_computed_tokens if request else 0
        image = next_image(self._scheduler, request, start) if request else None
        return image.offset + image.length - start if image else 0

    def _work(self, output: SchedulerOutput, decoding: Collection[str]) -> StepWork:
        requests, rows, tokens, context_sum = self._scheduler.requests, 0, 0, 0
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            if req_id in decoding:
                rows += num_tokens
            else:
                tokens += num_tokens
                # vLLM counts tokens as computed once they are scheduled.
                context_sum += num_tokens * (requests[req_id].num_computed_tokens - num_tokens)
        return StepWork(rows, tokens, context_sum)

    def _remember(self, output: SchedulerOutput, work: StepWork, began: float) -> None:
        if output.total_num_scheduled_tokens:
            self._in_flight.append(_Step(output, work, began))

    def measure(self, output: SchedulerOutput, result: StepResult) -> None:
        now = time.perf_counter()
        step = next((step for step in self._in_flight if step.output is output), None)
        if step is None:
            return  # nothing was scheduled
        while self._in_flight.popleft() is not step:
            pass
        self._last_end += max(0.0, step.began - self._last_results)
        self._last_results = now
        self._unseen += step.work
        failed = bool(result.failures) or result.pool_lost
        if failed or any(result.sampled_token_ids):
            if not failed and now > self._last_end:
                self._lengths.observe(self._unseen, now - self._last_end)
            self._unseen, self._last_end = StepWork(), now


def _limited(
    schedule: Callable[..., SchedulerOutput], self: Any, *args: Any, **options: Any
) -> SchedulerOutput:
    budget = _budget_of(self)
    if budget is None:
        return schedule(self, *args, **options)
    return budget.schedule(lambda: schedule(self, *args, **options))


def _measured(
    update: Callable[..., Any], self: Any, scheduler_output: SchedulerOutput, result: Any
) -> Any:
    budget = getattr(self, "step_budget", None)  # exists once something was scheduled
    if budget is not None and isinstance(result, StepResult):
        budget.measure(scheduler_output, result)
    return update(self, scheduler_output, result)


def _budget_of(scheduler: Any) -> _StepBudget | None:
    # Made before the scheduler's first step; None if there is no bound.
    if not hasattr(scheduler, "step_budget"):
        scheduler.step_budget = None
        max_step_ms = AdditionalConfig.of(scheduler.vllm_config).max_step_ms
        if max_step_ms is not None and scheduler.scheduler_config.enable_chunked_prefill:
            scheduler.step_budget = _StepBudget(scheduler, max_step_ms)
    return scheduler.step_budget


def _rows_of(request: Any) -> int:
    # The rows that vLLM plans for a decoding request in the next step.
    known = request.num_tokens_with_spec + request.num_output_placeholders
    return max(0, known - request.num_computed_tokens)


def _is_streamed(request: Any) -> bool:
    # FINAL_ONLY callers take the whole text at its end, so a slow step does not hold them up.
    params = request.sampling_params
    return params is not None and params.output_kind != RequestOutputKind.FINAL_ONLY
