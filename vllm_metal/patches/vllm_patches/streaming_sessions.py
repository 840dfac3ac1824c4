# SPDX-License-Identifier: Apache-2.0
"""Makes each turn of a streaming-input session continue exactly the text that vLLM keeps."""

# Remove when vLLM keeps states, rows, lengths, grammars and logprobs of sessions right. Read
# against vLLM 0.33.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_metal.patches.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.outputs import ModelRunnerOutput

#: Maps sampling parameters that no turn of a session may set to the reason.
REFUSED = {
    "prompt_logprobs": "a turn computes only what its prompt adds to the turns before",
    "structured_outputs": "vLLM takes the grammar of the first turn, and none after it",
}

#: Parameters that a front end takes from the first turn for all turns.
OF_ALL_TURNS = (
    "logprobs",
    "logprob_token_ids",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "output_kind",
)


def serve_sessions() -> None:
    """Makes vLLM's schedulers continue streaming-input sessions from the text that they keep.

    Call it in the process that schedules.
    """
    # A turn's text is everything before it except the last token of the previous turn, which was
    # sampled and not computed. Between turns a session keeps its blocks but no index in the
    # worker's tables: the worker is told that it is preempted. A recurrent state cannot be rolled
    # back: if a step went past the kept text, the session restarts from its prefix-cache hits.
    from vllm.v1.core.sched.scheduler import Scheduler

    replace(Scheduler, "_handle_stopped_request", _end_turn)
    replace(Scheduler, "_update_request_as_session", _continue_session)
    replace(Scheduler, "add_request", _require_same_salt)
    replace(Scheduler, "update_from_output", _end_pending_sessions)


def _end_turn(stop: Callable[..., bool], self: Any, request: Any) -> bool:
    queue = request.streaming_queue
    if request.resumable and not (queue and queue[0] is None):
        self.reset_preempted_req_ids.add(request.request_id)  # tells the worker to free its row
        self.turns_ended = [*getattr(self, "turns_ended", ()), request]
        # Drafts that were accepted after a stop were computed as well.
        ahead = request.num_in_flight_tokens or self.num_spec_tokens
        if self.has_mamba_layers and ahead and request.num_computed_tokens:
            self._free_request_blocks(request)
            request.num_computed_tokens = request.num_output_placeholders = 0
            if hasattr(self.connector, "blocks_given_up"):
                self.connector.blocks_given_up(request.request_id)
    return stop(self, request)


def _continue_session(update: Callable[..., None], self: Any, session: Any, turn: Any) -> None:
    update(self, session, turn)
    session.skip_reading_prefix_cache = session.get_skip_reading_prefix_cache()
    if session.num_tokens >= self.max_model_len:
        _end_session(
            self,
            session,
            f"this turn makes the session {session.num_tokens} tokens long, but "
            f"--max-model-len is {self.max_model_len}: begin another, with a shorter text",
        )


def _require_same_salt(add: Callable[..., None], self: Any, request: Any) -> None:
    # vLLM only uses a session's first cache_salt.
    session = self.requests.get(request.request_id)
    add(self, request)
    goes_on = session is not None and request.resumable
    if goes_on and request.cache_salt not in (None, session.cache_salt):
        _end_session(self, session, "cache_salt: a session has one, that of its first turn")


def _end_session(scheduler: Any, session: Any, reason: str) -> None:
    # Ends a session with an error, but only after the outputs of its turns so far: a front end that
    # reads both in one message would take the error for the end of the turn.
    from vllm.v1.request import RequestStatus

    if session.status == RequestStatus.WAITING:
        # A waiting session of this status is not scheduled, and no grammar will arrive.
        session.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    scheduler.sessions_to_end = getattr(scheduler, "sessions_to_end", {}) | {
        session.request_id: reason
    }


def _end_pending_sessions(
    update: Callable[..., dict[int, EngineCoreOutputs]],
    self: Any,
    scheduler_output: Any,
    result: ModelRunnerOutput,
) -> dict[int, EngineCoreOutputs]:
    reasons, self.sessions_to_end = getattr(self, "sessions_to_end", None), {}
    if reasons:
        self.grammar_compile_error_reqs.update(dict.fromkeys(reasons))
    outputs = update(self, scheduler_output, result)
    if reasons:
        for output in (each for of in outputs.values() for each in of.outputs):
            output.stop_reason = reasons.get(output.request_id, output.stop_reason)
    ended_turns, self.turns_ended = getattr(self, "turns_ended", ()), ()
    for request in ended_turns:
        request.stop_reason = None  # already sent, and the next turn may have none
    return outputs


def refuse_in_sessions() -> None:
    """Rejects settings that vLLM would ignore, or apply wrongly, in turns of a session."""
    # vLLM makes requests of prompts in its front ends. Each of them creates a configuration first,
    # which calls this function.
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor

    replace(InputProcessor, "process_inputs", _refusing)
    replace(OutputProcessor, "add_request", _require_same_settings)


def _require_same_settings(
    add: Callable[..., None], self: Any, request: EngineCoreRequest, *args: Any, **options: Any
) -> None:
    # With logprobs in a later turn but not in the first, an assertion ends vLLM's front end.
    state, params = self.request_states.get(request.request_id), request.sampling_params
    for setting in OF_ALL_TURNS if state is not None and request.resumable else ():
        first, own = (getattr(of, setting, None) for of in (state.first_turn, params))
        if own != first:
            raise ValueError(
                f"{setting}={own} is not supported in a streaming session whose first turn sets "
                f"{first}: use the same value in all turns"
            )
    add(self, request, *args, **options)
    if state is None and request.resumable:
        self.request_states[request.request_id].first_turn = params


def _refusing(
    process: Callable[..., EngineCoreRequest],
    self: Any,
    request_id: str,
    prompt: Any,
    params: Any,
    *args: Any,
    **options: Any,
) -> EngineCoreRequest:
    for setting, why in REFUSED.items() if options.get("resumable") else ():
        if getattr(params, setting, None) is not None:
            raise ValueError(
                f"{setting} is not supported in streaming sessions: {why}. Leave it out, or send "
                "the text as a separate request"
            )
    return process(self, request_id, prompt, params, *args, **options)
