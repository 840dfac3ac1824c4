# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's schedulers end failed requests, send salts and images, and end chunks in blocks."""

# Remove when outputs of a worker can name failed requests, a reset ends loads, a worker gets a
# request's salt and its images' data, and vLLM ends a chunk within a block. Read against vLLM
# 0.33.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched import output as sched_output
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_metal.patches.vllm_patches.replacing import replace
from vllm_metal.patches.vllm_patches.step_result import NOT_A_NUMBER, StepResult, send_metrics

if TYPE_CHECKING:
    from vllm.multimodal.inputs import PlaceholderRange
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger(__name__)
#: Statuses of requests that may hold blocks though they neither run nor load K/V.
_HOLDING = (
    RequestStatus.WAITING,
    RequestStatus.PREEMPTED,
    RequestStatus.WAITING_FOR_STREAMING_REQ,
)


def end_failed_requests() -> None:
    """Makes vLLM's schedulers process a StepResult; call it in the process that schedules.

    vLLM ends a request with finish reason "error" if its grammar does not compile or its K/V cannot
    be fetched, but a worker cannot report a failed request. With this, the scheduler removes failed
    requests' blocks from the prefix cache and clears them before reuse, as a NaN spoils sums even
    with an attention weight of zero. If the pool is lost, all other running requests restart. If
    requests with loaded K/V hold all blocks and none can run, the last of them restarts.

    A step's metrics are passed on to the server, which vLLM's workers cannot do.
    """
    replace(Scheduler, "update_from_output", _ending_failed_requests)
    replace(Scheduler, "update_from_output", _send_metrics)
    replace(Scheduler, "_get_new_block_ids_to_zero", _with_blocks_to_clear)
    replace(Scheduler, "reset_prefix_cache", _freeing_blocks_first)
    replace(Scheduler, "schedule", _breaking_deadlocks)


def send_salts() -> None:
    """Makes vLLM's schedulers send each request's cache_salt to the worker.

    The worker separates the texts that drafts are taken from by salt. vLLM only uses it to hash
    blocks.
    """
    replace(Scheduler, "schedule", _with_salts)


def send_images() -> None:
    """Makes vLLM's schedulers send the data of all of a request's images when it starts.

    vLLM omits images within a prefix-cache hit. But a preempted request resumes without its data,
    and by then the prefix may have been evicted.
    """
    replace(sched_output, "strip_covered_mm_data", _not_stripped)


def end_chunks_within_blocks() -> None:
    """Makes vLLM's schedulers prefill part of a block if a step has no room for a whole one.

    For recurrent states, vLLM ends chunks at block boundaries. If a step has room for a block, but
    not for a block besides the decode tokens, a prompt gets no tokens while others decode. Here a
    block holds the state at the request's newest token, so a chunk may end within it.

    With several MTP layers, vLLM ends no chunk within the tokens at the end of a prompt that they
    read ahead. If a block ends there, a prompt gets no tokens in any step. Here MTP layers compute
    their last rows again once the tokens are known, so a chunk may end there.
    """
    replace(Scheduler, "_mamba_block_aligned_split", _filling_blocks_in_part)
    replace(Scheduler, "_reserve_prefill_lookahead", _ending_within_lookahead)


def _not_stripped(
    strip: Callable[..., Any], mm_features: list[Any], *args: Any, **options: Any
) -> list[Any]:
    return mm_features


def _with_salts(
    schedule: Callable[..., SchedulerOutput], self: Any, *args: Any, **options: Any
) -> SchedulerOutput:
    output = schedule(self, *args, **options)
    for data in output.scheduled_new_reqs:
        vars(data)["cache_salt"] = self.requests[data.req_id].cache_salt  # pickled with fields
    return output


def _send_metrics(
    update: Callable[..., dict[int, EngineCoreOutputs]],
    self: Any,
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
) -> dict[int, EngineCoreOutputs]:
    outputs = update(self, scheduler_output, model_runner_output)
    metrics = getattr(model_runner_output, "metrics", None)  # vLLM's own results have none
    if metrics:
        metrics = {**metrics, **(_call_connector(self, "metrics_after", metrics) or {})}
    for of_client in outputs.values():
        if metrics and of_client.scheduler_stats is not None:
            send_metrics(of_client.scheduler_stats, metrics)
    return outputs


def next_image(scheduler: Any, request: Any, position: int) -> PlaceholderRange | None:
    """Returns the image at a request's position that must be computed in one step.

    None: there is no image, or it may be split between steps.
    """
    # An encoder-decoder's positions are not those of its text.
    if not scheduler.scheduler_config.disable_chunked_mm_input or scheduler.is_encoder_decoder:
        return None
    positions = (feature.mm_position for feature in request.mm_features or ())
    return next((at for at in positions if at.offset <= position < at.offset + at.length), None)


def _filling_blocks_in_part(
    split: Callable[..., int], self: Any, request: Any, num_new_tokens: int, *found: int
) -> int:
    # `found`: numbers of tokens found in the prefix cache and by the connector.
    chunk = split(self, request, num_new_tokens, *found)
    if chunk > 0 or num_new_tokens <= 0:
        return chunk
    block_size = int(self.cache_config.block_size)
    start = request.num_computed_tokens + sum(found)
    return min(num_new_tokens, block_size - start % block_size)


def _ending_within_lookahead(
    reserve: Callable[..., int], self: Any, request: Any, num_computed_tokens: int, chunk: int
) -> int:
    return reserve(self, request, num_computed_tokens, chunk) or chunk


def _ending_failed_requests(
    update: Callable[..., dict[int, EngineCoreOutputs]],
    self: Any,
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
) -> dict[int, EngineCoreOutputs]:
    result = model_runner_output
    if not isinstance(result, StepResult) or not (result.failures or result.pool_lost):
        return update(self, scheduler_output, result)
    if result.pool_lost:
        self.reset_prefix_cache(reset_running_requests=True)
    failed = result.failures.keys() & self.requests.keys()
    # If a step raised, the blocks that its requests stored before are valid.
    invalid = [req_id for req_id in failed if result.failures[req_id] == NOT_A_NUMBER]
    _call_connector(self, "requests_failed", [self.requests[req_id] for req_id in invalid])
    held = {block for req_id in failed for block in _forget_blocks(self, req_id)}
    self.grammar_compile_error_reqs.update(dict.fromkeys(failed))  # so that the update ends them
    outputs = update(self, scheduler_output, result)
    self.blocks_to_clear = [*getattr(self, "blocks_to_clear", ()), *_unheld(self, held)]
    for output in (output for of_client in outputs.values() for output in of_client.outputs):
        if reason := result.failures.get(output.request_id):
            logger.error("Request %s failed: %s", output.request_id, reason)
            output.stop_reason = reason
            output.num_nans_in_logits = int(reason == NOT_A_NUMBER)
    return outputs


def _freeing_blocks_first(
    reset: Callable[..., bool],
    self: Any,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> bool:
    # A reset raises while requests that do not run hold blocks: those that load K/V or have loaded
    # them and wait to be scheduled, sessions between their turns, and those that ended during a
    # load. Steps in flight hold blocks as well: with a connector that loads, vLLM frees blocks only
    # after these steps. Here the engine's thread orders steps and loads, so no step in flight
    # overwrites K/V that are loaded into a block after it.
    _call_connector(self, "release_pins")
    if not reset_running_requests:
        return reset(self, reset_running_requests, reset_connector)
    # For the reset only. A preempted request may end with a token of a step in flight and then
    # store its blocks: until that step has ended, they must not go to another request.
    defers, self.defer_block_free = self.defer_block_free, False
    try:
        _free_blocks_of_loads(self)
        return reset(self, reset_running_requests, reset_connector)
    finally:
        self.defer_block_free = defers


def _free_blocks_of_loads(scheduler: Any) -> None:
    """Restarts requests that hold blocks but do not run."""
    manager, loading = scheduler.kv_cache_manager, set()
    for request in list(scheduler.kv_holding_waiting):
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            loading.add(request.request_id)
            # When its load ends as failed, the scheduler restarts it.
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
            manager.free(request)
            request.num_computed_tokens = 0
            scheduler._inflight_prefills.discard(request)
        elif request.status in _HOLDING:
            _restart(scheduler, request)
    for request in scheduler.requests.values():
        if request.is_finished():  # aborted while its K/V were loaded
            loading.add(request.request_id)
            manager.free(request)
    while scheduler.deferred_frees:
        _, blocks = scheduler.deferred_frees.popleft()
        manager.block_pool.free_blocks(reversed(blocks))
    _call_connector(scheduler, "cancel_loads", loading)


def _breaking_deadlocks(
    schedule: Callable[..., SchedulerOutput], self: Any, *args: Any, **options: Any
) -> SchedulerOutput:
    # Requests with loaded K/V hold blocks before they run, but only running ones are preempted.
    # vLLM lets a request load if the earlier ones still fit. But it underestimates sliding windows,
    # and running requests may take those blocks: then none runs, and none of those that hold blocks
    # gets enough for its next step. A session holds its blocks between turns for any time.
    output = schedule(self, *args, **options)
    if self.running or output.preempted_req_ids or self._pause_state == PauseState.PAUSED_ALL:
        return output
    paused: list[Any] = []
    others: list[Any] = []
    for request in self.kv_holding_waiting:
        between_turns = request.status == RequestStatus.WAITING_FOR_STREAMING_REQ
        (paused if between_turns else others).append(request)
    if paused:
        waits = any(_waits_for_blocks(self, each) for each in (*others, *self.waiting))
        if waits and self.num_waiting_for_streaming_input < self.max_num_active_reqs:
            _restart(self, paused[0])
    elif others and all(_waits_for_blocks(self, each) for each in others):
        _restart(self, others[-1])
    return output


def _waits_for_blocks(scheduler: Any, request: Any) -> bool:
    """Returns whether a request could be scheduled if there were enough blocks."""
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return request.request_id in scheduler.finished_recving_kv_req_ids
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def _restart(scheduler: Any, request: Any) -> None:
    """Frees the blocks of a request that does not run; they stay in the prefix cache."""
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        scheduler._handle_blocked_waiting_request(request)  # its load has ended
    scheduler.kv_holding_waiting.remove_request(request)
    scheduler.waiting.prepend_request(request)
    scheduler.kv_cache_manager.free(request)
    request.num_computed_tokens = 0
    scheduler._inflight_prefills.discard(request)
    _call_connector(scheduler, "forget_blocks", request.request_id)


def _call_connector(scheduler: Any, method: str, *arguments: Any) -> Any:
    """Calls a method that only this plugin's connector has; returns None without it."""
    call = getattr(scheduler.connector, method, None)
    return None if call is None else call(*arguments)


def _with_blocks_to_clear(
    blocks_to_zero: Callable[[Any], list[int] | None], self: Any
) -> list[int] | None:
    unclean, self.blocks_to_clear = getattr(self, "blocks_to_clear", []), []
    return [*unclean, *(blocks_to_zero(self) or ())] or None


def _unheld(scheduler: Any, blocks: Set[int]) -> list[int]:
    """Returns the blocks that no request holds any more.

    Ignores references that vLLM defers freeing until a step in flight has ended: the next step,
    which clears the blocks, runs after it.
    """
    deferred = Counter(block.block_id for _, of in scheduler.deferred_frees for block in of)
    pool = scheduler.kv_cache_manager.block_pool
    return [block for block in blocks if pool.blocks[block].ref_cnt == deferred[block]]


def _forget_blocks(scheduler: Any, req_id: str) -> set[int]:
    """Removes a request's blocks from the prefix cache, and returns them.

    Includes cached blocks with the hashes of its text that it no longer holds.
    """
    manager, request = scheduler.kv_cache_manager, scheduler.requests[req_id]
    blocks = {block for group in manager.get_block_ids(req_id) for block in group}
    for group in range(len(scheduler.kv_cache_config.kv_cache_groups)):
        for block_hash in request.block_hashes:
            found = manager.block_pool.get_cached_block(block_hash, [group])
            blocks |= {block.block_id for block in found or ()}
    manager.evict_blocks(blocks)
    return blocks
