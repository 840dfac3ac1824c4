# SPDX-License-Identifier: Apache-2.0
"""Has vLLM's schedulers end the requests that a worker names, send salts, end chunks in blocks."""

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
from vllm_metal.patches.vllm_patches.step_result import NOT_A_NUMBER, StepResult, send_figures

if TYPE_CHECKING:
    from vllm.multimodal.inputs import PlaceholderRange
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput

logger = init_logger(__name__)
#: Of requests that hold blocks, and neither run nor have K/V loaded.
_HOLDING = (
    RequestStatus.WAITING,
    RequestStatus.PREEMPTED,
    RequestStatus.WAITING_FOR_STREAMING_REQ,
)


def end_failed_requests() -> None:
    """Has vLLM's schedulers act on a StepResult; call it in the process that schedules.

    vLLM ends requests with finish reason "error" where their grammar does not compile or their K/V
    cannot be fetched, but a worker has no way to name one. The scheduler drops what the failed
    requests left in the prefix cache, and has their blocks cleared before it gives them to others:
    a NaN spoils sums even where attention gives it no weight. Where the pool is lost, the scheduler
    starts all other running requests again. Where requests whose K/V were loaded hold all blocks,
    and none has enough of them to run, the last of them starts again.

    A step's figures go on to the server: vLLM's workers cannot report what vLLM does not know.
    """
    replace(Scheduler, "update_from_output", _ending_failed_requests)
    replace(Scheduler, "update_from_output", _sending_figures)
    replace(Scheduler, "_get_new_block_ids_to_zero", _with_blocks_to_clear)
    replace(Scheduler, "reset_prefix_cache", _letting_go_of_blocks)
    replace(Scheduler, "schedule", _breaking_deadlocks)


def send_salts() -> None:
    """Has vLLM's schedulers send each request's cache_salt along.

    They keep the salt for the hashes of blocks and send none to the worker, which keeps apart by it
    what requests draft from.
    """
    replace(Scheduler, "schedule", _with_salts)


def send_images() -> None:
    """Has vLLM's schedulers send the data of all images of a request when it starts.

    They leave out those of images that lie in a prefix that was found. A request that is preempted
    comes back without its data, and by then the prefix may be gone.
    """
    replace(sched_output, "strip_covered_mm_data", _not_stripped)


def end_chunks_within_blocks() -> None:
    """Has vLLM's schedulers prefill part of a block where there is no room for all of it.

    vLLM ends chunks at the ends of blocks, whose states it keeps. Where a step's tokens hold a
    block, but not a block and the tokens of all that decode, it gives the prompt no token at all,
    for as long as the others decode. A request's block holds the state at its newest token,
    wherever that is, so a chunk may end there.
    """
    replace(Scheduler, "_mamba_block_aligned_split", _never_empty)


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


def _sending_figures(
    update: Callable[..., dict[int, EngineCoreOutputs]],
    self: Any,
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
) -> dict[int, EngineCoreOutputs]:
    outputs = update(self, scheduler_output, model_runner_output)
    figures = getattr(model_runner_output, "figures", None)  # vLLM's own results have none
    if figures:
        figures = {**figures, **(_tell_connector(self, "figures_after", figures) or {})}
    for of_client in outputs.values():
        if figures and of_client.scheduler_stats is not None:
            send_figures(of_client.scheduler_stats, figures)
    return outputs


def next_image(scheduler: Any, request: Any, position: int) -> PlaceholderRange | None:
    """The image at a position of a request, whose rows are to be computed in one step.

    Returns:
        None: there is none, or its rows may be computed in any steps.
    """
    # An encoder-decoder's positions are not those of its text.
    if not scheduler.scheduler_config.disable_chunked_mm_input or scheduler.is_encoder_decoder:
        return None
    places = (feature.mm_position for feature in request.mm_features or ())
    return next((at for at in places if at.offset <= position < at.offset + at.length), None)


def _never_empty(
    split: Callable[..., int], self: Any, request: Any, num_new_tokens: int, *found: int
) -> int:
    """As many arguments follow as vLLM gives: tokens found computed here, and elsewhere."""
    chunk = split(self, request, num_new_tokens, *found)
    if chunk > 0 or num_new_tokens <= 0:
        return chunk
    block_size = int(self.cache_config.block_size)
    start = request.num_computed_tokens + sum(found)
    return min(num_new_tokens, block_size - start % block_size)


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
    # What was kept of requests whose step raised is sound: it was computed before.
    unsound = [req_id for req_id in failed if result.failures[req_id] == NOT_A_NUMBER]
    _tell_connector(self, "requests_failed", [self.requests[req_id] for req_id in unsound])
    held = {block for req_id in failed for block in _forget_blocks(self, req_id)}
    self.grammar_compile_error_reqs.update(dict.fromkeys(failed))  # so that the update ends them
    outputs = update(self, scheduler_output, result)
    self.blocks_to_clear = [*getattr(self, "blocks_to_clear", ()), *_given_up(self, held)]
    for output in (output for of_client in outputs.values() for output in of_client.outputs):
        if reason := result.failures.get(output.request_id):
            logger.error("Request %s failed: %s", output.request_id, reason)
            output.stop_reason = reason
            output.num_nans_in_logits = int(reason == NOT_A_NUMBER)
    return outputs


def _letting_go_of_blocks(
    reset: Callable[..., bool],
    self: Any,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> bool:
    """A reset raises while requests that do not run hold blocks.

    Those whose K/V are being loaded do, those whose K/V came and that wait to be scheduled,
    sessions between their turns, and those that ended while K/V were loaded. So do steps in flight:
    with a connector that loads, blocks are freed when these have ended. Steps and loads take their
    order from the engine's thread here, so that no step in flight writes over what is loaded into a
    block after it.
    """
    _tell_connector(self, "let_go_of_pins")
    if not reset_running_requests:
        return reset(self, reset_running_requests, reset_connector)
    # For the reset only. A preempted request may end with a token of a step in flight, and its
    # blocks are stored then: until that step has ended, they must not be another request's.
    defers, self.defer_block_free = self.defer_block_free, False
    try:
        _free_blocks_of_loads(self)
        return reset(self, reset_running_requests, reset_connector)
    finally:
        self.defer_block_free = defers


def _free_blocks_of_loads(scheduler: Any) -> None:
    """Has requests that hold blocks and do not run start from nothing."""
    manager, loading = scheduler.kv_cache_manager, set()
    for request in list(scheduler.kv_holding_waiting):
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            loading.add(request.request_id)
            # Told of the end of its load, the scheduler takes it back to the start.
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
            manager.free(request)
            request.num_computed_tokens = 0
            scheduler._inflight_prefills.discard(request)
        elif request.status in _HOLDING:
            _start_again(scheduler, request)
    for request in scheduler.requests.values():
        if request.is_finished():  # aborted while its K/V were loaded
            loading.add(request.request_id)
            manager.free(request)
    while scheduler.deferred_frees:
        _, blocks = scheduler.deferred_frees.popleft()
        manager.block_pool.free_blocks(reversed(blocks))
    _tell_connector(scheduler, "cancel_loads", loading)


def _breaking_deadlocks(
    schedule: Callable[..., SchedulerOutput], self: Any, *args: Any, **options: Any
) -> SchedulerOutput:
    """Requests whose K/V were loaded hold blocks before they run, and only what runs is preempted.

    vLLM lets a request load where the rest of those before it still fits. It counts too little for
    windows, and what runs may take those blocks; so it can come that nobody runs, and none of those
    that hold blocks finds enough for its next step. A session between two turns holds its blocks
    for as long as its caller likes.
    """
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
            _start_again(self, paused[0])
    elif others and all(_waits_for_blocks(self, each) for each in others):
        _start_again(self, others[-1])
    return output


def _waits_for_blocks(scheduler: Any, request: Any) -> bool:
    """Whether a request could be scheduled if there were room."""
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        return request.request_id in scheduler.finished_recving_kv_req_ids
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def _start_again(scheduler: Any, request: Any) -> None:
    """Takes the blocks of a request that does not run; the prefix cache knows them still."""
    if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        scheduler._handle_blocked_waiting_request(request)  # its load has ended
    scheduler.kv_holding_waiting.remove_request(request)
    scheduler.waiting.prepend_request(request)
    scheduler.kv_cache_manager.free(request)
    request.num_computed_tokens = 0
    scheduler._inflight_prefills.discard(request)
    _tell_connector(scheduler, "blocks_given_up", request.request_id)


def _tell_connector(scheduler: Any, method: str, *arguments: Any) -> Any:
    """Calls a method that only this plugin's connector has; None where there is none."""
    tell = getattr(scheduler.connector, method, None)
    return None if tell is None else tell(*arguments)


def _with_blocks_to_clear(
    blocks_to_zero: Callable[[Any], list[int] | None], self: Any
) -> list[int] | None:
    unclean, self.blocks_to_clear = getattr(self, "blocks_to_clear", []), []
    return [*unclean, *(blocks_to_zero(self) or ())] or None


def _given_up(scheduler: Any, blocks: Set[int]) -> list[int]:
    """Picks the blocks that no request holds any more.

    With a connector, blocks of a request that a step in flight still computes count as held until
    it has ended. The next step clears them all the same: it comes after the steps in flight.
    """
    deferred = Counter(block.block_id for _, of in scheduler.deferred_frees for block in of)
    pool = scheduler.kv_cache_manager.block_pool
    return [block for block in blocks if pool.blocks[block].ref_cnt == deferred[block]]


def _forget_blocks(scheduler: Any, req_id: str) -> set[int]:
    """Takes a request's blocks out of the prefix cache, and returns the blocks.

    Among them are blocks that the cache holds under the hashes of the request's text, though the
    request does not hold them itself any more.
    """
    manager, request = scheduler.kv_cache_manager, scheduler.requests[req_id]
    blocks = {block for group in manager.get_block_ids(req_id) for block in group}
    for group in range(len(scheduler.kv_cache_config.kv_cache_groups)):
        for block_hash in request.block_hashes:
            found = manager.block_pool.get_cached_block(block_hash, [group])
            blocks |= {block.block_id for block in found or ()}
    manager.evict_blocks(blocks)
    return blocks
