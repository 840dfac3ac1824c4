# SPDX-License-Identifier: Apache-2.0
"""ModelRunner: the order of a step (requests, blocks, forward, results, submission)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from vllm.v1.outputs import DraftTokenIds

from metal_kernels.layout import PositionLag
from vllm_metal.engine.batch.input_batch import InputBatch, StepDrafts, prepare
from vllm_metal.engine.batch.output_head import OutputHead
from vllm_metal.engine.batch.outputs import StepOutput, Unread
from vllm_metal.engine.batch.per_request_state import PerRequestState, RequestsRefused
from vllm_metal.engine.batch.prompt_column import PromptColumn
from vllm_metal.engine.batch.requests import Requests
from vllm_metal.engine.spec_decode.speculator import Speculator
from vllm_metal.engine.worker.early_reads import EarlyReads
from vllm_metal.engine.worker.results import Step
from vllm_metal.engine.worker.step_hooks import NO_HOOKS, StepHooks
from vllm_metal.metrics.step_clock import StepClock
from vllm_metal.metrics.step_metrics import take_measured

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

    from vllm_metal.engine.models.executor import ModelExecutor
    from vllm_metal.engine.models.paged_layers import PagedLayers
    from vllm_metal.engine.spec_decode.draft_writer import DraftWriter


class ModelRunner:
    """Turns one SchedulerOutput into results.

    `execute` and `finish` run a step's parts in order; `recovery` handles their exceptions.

    Nothing from `update_states` to `submit`, the end of `finish`, waits for the device, except if:
    - the KV pool is written by MLX's scatter: the step before must then have read it when the next
      writes are queued (see kv_cache.scatter);
    - a new image's tower, or a new adapter's weights, are computed while the batch is laid out;
    - custom logits processors read the tokens of the step before;
    - the model has tables on disk, of which the host reads its tokens' rows just before `submit`.
    With speculation, `process_accepted` waits before all this if `_needs_accepted` says so.
    """

    def __init__(
        self,
        model: ModelExecutor,
        requests: Requests,
        end: OutputHead,
        max_num_reqs: int,
        speculator: Speculator | None = None,
        draft_writer: DraftWriter | None = None,
        columns: Sequence[PerRequestState] = (),
        hooks: StepHooks = NO_HOOKS,
        clock: StepClock | None = None,
    ) -> None:
        """
        Args:
            model: computes hidden states.
            requests: persistent state of the requests.
            end: makes results from hidden states.
            max_num_reqs: number of req_idx.
            speculator: None: this engine does not draft.
            draft_writer: writes the K/V of a draft network for other engines; only without a
                speculator.
            columns: per-request inputs of the model's modules.
            hooks: called around each step.
            clock: measures waits for the step before; None: not measured.
        """
        self._model = model
        self._requests = requests
        self._end = end
        self._speculator = speculator
        self._draft_writer = draft_writer
        self._of_model = columns
        speculators = () if speculator is None else (speculator,)
        self._columns: tuple[PerRequestState, ...] = (*columns, *speculators, end)
        self._hooks = hooks
        self._clock = clock or StepClock()
        self._last_token_ids = mx.zeros(max_num_reqs, mx.int32)  # by req_idx, the newest token
        self._laid_out: InputBatch | None = None  # its forward is built, and nothing more
        self._newest: StepOutput | None = None  # the step handed over last
        self._early_reads = EarlyReads()
        #: How often a step waited to know what the step before it sampled.
        self.num_waits = 0
        self._pending: list[StepOutput] = []  # with speculation; the newest last, two at most
        self._in_flight: list[mx.array] = []  # its arrays
        self._joining: list[mx.array] = []  # to submit with the current step, see `join_step`

    def execute(self, step: Step) -> None:
        """Updates requests and blocks, and builds the forward of the scheduled tokens.

        Raises RequestsRefused: some requests could not be added.
        """
        take_measured()  # discard those of a failed step, or of none
        self.process_accepted(step.scheduler_output)  # which drafts of earlier steps were kept
        self.finalize_blocks(step.scheduler_output)  # K/V of drafts that blocks must hold
        self.update_states(step, pool_valid=True)  # requests come, go, get on; K/V leave the pool
        self.update_blocks(step.scheduler_output)  # cleared, copied
        self._hooks.before_forward()  # K/V enter the pool
        if step.req_ids:
            self.forward(step.scheduler_output)
        else:
            self.end_step(step, computed=True)

    def finish(self, step: Step, grammar_output: GrammarOutput | None) -> StepOutput:
        """Builds the results of the forward just built, and submits the step to the device."""
        self._hooks.before_submit()
        output = self.submit(grammar_output)
        self.end_step(step, computed=True)
        return output

    def update_states(self, step: Step, pool_valid: bool) -> None:
        """Notifies hooks, requests and columns of a step, each only once even if one call failed.

        Args:
            step: the scheduler's step.
            pool_valid: whether the pool holds what the scheduler assumes.

        Raises:
            RequestsRefused: some requests could not be added.
        """
        if not step.hooks_told:
            step.hooks_told = True
            self._hooks.before_step(step.scheduler_output, pool_valid)
        if not step.requests_told:
            step.requests_told = True
            self.update_requests(step.scheduler_output)

    def end_step(self, step: Step, computed: bool) -> None:
        """Notifies hooks once that a step was submitted, had no tokens, or failed.

        Args:
            step: receives the transfers to report to the scheduler, and their metrics.
            computed: whether the pool holds what the scheduler assumes, this step included.
        """
        if not step.ended:
            step.ended = True
            step.transfers = self._hooks.after_step(computed)
            step.metrics = self._hooks.metrics()

    def for_warm_up(
        self, make_head: Callable[[ModelExecutor, Requests], OutputHead]
    ) -> ModelRunner:
        """Makes a runner for warm-up steps, over the same networks, pool and requests.

        The new runner drafts only with a draft network, and records nothing in this one.

        Args:
            make_head: makes its output head from this runner's model and requests.
        """
        end = make_head(self._model, self._requests)
        speculator = self._speculator
        if speculator is not None:
            speculator = None if speculator.reads_text else speculator.for_warm_up()
        max_num_reqs = self._last_token_ids.size
        writer = self._draft_writer
        # The dense forward, with which warm-up is compared, attends to earlier tokens alone.
        columns = [each for each in self._of_model if not isinstance(each, PromptColumn)]
        return ModelRunner(
            self._model, self._requests, end, max_num_reqs, speculator, writer, columns
        )

    @property
    def num_drafts(self) -> int:
        """The most drafts of a request in a step."""
        return 0 if self._speculator is None else self._speculator.num_drafts

    @property
    def ends_at_once(self) -> bool:
        """Whether `execute_model` also returns the step's results, without `sample_tokens`."""
        return self._end.at_once

    @property
    def layers(self) -> PagedLayers:
        """The target's layers over the pool."""
        return self._model

    def join_step(self, arrays: Sequence[mx.array]) -> None:
        """Adds arrays for the device to compute with the step that is being built."""
        self._joining += arrays

    def complete_draft_kv(self, ends: Mapping[str, int]) -> None:
        """Writes draft K/V and recurrent states that requests' blocks still lack.

        Includes requests that no longer draft.

        Args:
            ends: request id to the number of its tokens that must have K/V.
        """
        if self._model.keeps_states:
            # A state is in its block once it is known which drafts were accepted.
            self.process_outputs()
            self._model.flush_states()
        if self._speculator is not None:
            self._speculator.complete_draft_kv(ends)

    def finalize_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Completes the blocks of requests that leave in this step, so that others can reuse them.

        Includes the last block of a session between turns, which resumes after its last token.
        """
        if self._speculator is None:
            return
        paused = scheduler_output.preempted_req_ids or set()
        if self._model.keeps_states and paused:
            here = [self._requests[req_id].req_idx for req_id in paused if req_id in self._requests]
            self._model.flush_states(np.array(here, np.int32))
        self._speculator.complete_draft_blocks(
            scheduler_output.finished_req_ids, self._model.block_size
        )
        self._speculator.complete_draft_blocks(paused, 1)

    def process_accepted(self, scheduler_output: SchedulerOutput) -> None:
        """Processes accepted tokens that the next step depends on, and measures the wait."""
        before = self.num_waits
        with self._clock.waiting():
            self.process_outputs(scheduler_output)
        if self.num_waits > before:
            self._clock.accepted_known()

    def process_outputs(self, scheduler_output: SchedulerOutput | None = None) -> None:
        """Processes the accepted tokens of earlier steps, with speculation.

        vLLM has read all steps but the newest. The newest one is read, and waited for, only if the
        host must know its tokens.

        Args:
            scheduler_output: the next step's; None: the host must know all tokens.
        """
        if self._speculator is None or not self._pending:
            return
        newest = self._pending[-1]
        needed = scheduler_output is None or self._needs_accepted(scheduler_output)
        due = self._pending if needed or newest.is_read else self._pending[:-1]
        self._pending = self._pending[len(due) :]
        self.num_waits += sum(not output.is_read for output in due)
        self._speculator.record(due)
        if self._model.keeps_states:
            for output in due:
                self._model.record_accepted(output.batch, output.last_rows_np())

    def _needs_accepted(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether the host must know the step before's samples to lay out a step.

        Otherwise it uses upper bounds, which the device corrects by the number of rejected drafts.
        """
        assert self._speculator is not None
        return (
            self._speculator.reads_text
            or not self._model.pipelined  # it waits in any case
            or self._model.needs_outcome  # states are put right before they are used
            or scheduler_output.has_structured_output_requests  # masks are made of known drafts
            or scheduler_output.kv_connector_metadata is not None  # stored blocks must be complete
            or self._speculator.is_copying(scheduler_output.scheduled_spec_decode_tokens)
        )

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Updates requests and columns from the scheduler's output.

        Raises:
            RequestsRefused: some requests could not be added. They have no req_idx, and all others
                are intact. State that this runner's columns keep of them, such as a custom logits
                processor's, is undefined: make a new runner.
        """
        for column in self._columns:
            column.step_begins(scheduler_output)
        changes = self._requests.apply(scheduler_output)
        failed = dict(changes.failed)
        for state in changes.left:
            try:
                self._model.leave(state.req_idx)
                for column in self._columns:
                    column.leave(state.req_idx)
            except Exception as error:
                failed[state.req_id] = error
        for state in changes.entered:
            try:
                for column in self._columns:
                    column.enter(state)
            except Exception as error:
                failed[state.req_id] = error
                self._requests.remove_request(state.req_id)
        if failed:
            raise RequestsRefused(failed)

    def update_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Clears and copies the blocks that the scheduler lists, even in a step without tokens."""
        zeroed, copied = (
            scheduler_output.new_block_ids_to_zero,
            scheduler_output.kv_cache_block_copies,
        )
        if zeroed or copied:
            self._model.update_blocks(zeroed or (), copied or ())

    def forward(self, scheduler_output: SchedulerOutput) -> None:
        """Builds the forward pass of a step's requests, for `submit` to finish."""
        drafts, lag = self._step_drafts(scheduler_output)
        batch = prepare(
            self._requests,
            scheduler_output.num_scheduled_tokens,
            self._last_token_ids,
            drafts,
            lag,
        )
        inputs = batch.inputs
        for column in self._columns:
            inputs = column.inputs(batch, inputs)
        hidden_states = self._model.forward_hidden(batch, self._requests.block_tables, inputs)
        rows = self._model.table_rows
        if rows.are_due and not self._requests.have_unread_np(batch.req_indices_np).any():
            rows.read()
        self._end.begin(batch, hidden_states)
        if self._speculator is not None:
            self._speculator.take_hidden(batch)
        self._laid_out = batch

    def _step_drafts(
        self, scheduler_output: SchedulerOutput
    ) -> tuple[StepDrafts | None, PositionLag | None]:
        """The drafts that a step verifies, and the lag of its requests' token counts."""
        if self._speculator is None:
            return None, None
        if not self._model.pipelined:
            self.wait()  # draft passes scatter at once, after the step before has read all
        self._requests.roll_back()
        unread = self._unread(scheduler_output)
        drafts = self._speculator.step_drafts(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.scheduled_spec_decode_tokens,
            unread,
        )
        # vLLM's scheduler keeps this object, and reads its metrics from it after the step.
        req_ids = scheduler_output.num_scheduled_tokens
        scheduler_output.num_invalid_spec_tokens = drafts.unused(req_ids)
        return drafts, None if unread is None else unread.lag

    def _unread(self, scheduler_output: SchedulerOutput) -> Unread | None:
        """Unread tokens, of the step before, of the requests that are being laid out."""
        if self._newest is None:
            return None
        req_ids = scheduler_output.num_scheduled_tokens
        req_indices = [self._requests[req_id].req_idx for req_id in req_ids]
        return self._newest.unread(np.array(req_indices, np.int32))

    def submit(self, grammar_output: GrammarOutput | None) -> StepOutput:
        """Builds the results of the forward just built, and submits the step to the device."""
        assert self._laid_out is not None
        batch, self._laid_out = self._laid_out, None
        if self._end.needs_host_tokens and self._newest is not None:
            self._newest.token_ids()
        output, arrays = self._end.finish(grammar_output)
        self._note_sampled(output)
        if self._speculator is not None:
            self._pending.append(output)
        self._submit(arrays)
        if self._draft_writer is not None:
            self._submit_drafts(self._draft_writer.write(batch, self._last_token_ids))
        output.metrics |= take_measured()
        self._newest = output
        return output

    def _note_sampled(self, output: StepOutput) -> None:
        """Records the sampled tokens, on the device, as the newest ones of their requests."""
        if output.sampled is None:
            return
        req_indices = output.batch.req_indices_np[output.batch.sampling_np]
        # A new array: writing into this one would make the step before stand for this step.
        self._last_token_ids = mx.put_along_axis(
            self._last_token_ids, mx.array(req_indices), output.sampled.last_token_ids, axis=0
        )
        self._requests.note_sampled(req_indices, output.batch.spans.lens_np)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts for vLLM's scheduler to reserve tokens for; None without speculation.

        With async scheduling, the drafts of the step that is laid out but not submitted, for the
        scheduler to check against grammars; otherwise the drafts after the newest step.
        """
        if self._speculator is None or self._newest is None:
            return None
        if self._laid_out is not None:
            drafts = self._speculator.laid_out_drafts()
        else:
            self.process_outputs()
            drafts = self._speculator.drafts_after(self._newest.batch)
        return DraftTokenIds(list(drafts), list(drafts.values()))

    def _submit(self, arrays: list[mx.array]) -> None:
        """Submits the step to the device; waits for the step before if the pool requires it."""
        waits = not self._model.pipelined
        if waits:
            self.wait()
        self._early_reads.before_submit(self._newest, ended=waits)
        self.read_tables()
        self._in_flight = [*arrays, self._last_token_ids, *self._joining]
        self._joining = []
        mx.async_eval(self._in_flight)
        self._early_reads.after_submit()

    def read_tables(self) -> None:
        """Reads the step's rows of tables on disk, after waiting for the tokens sampled before."""
        rows = self._model.table_rows
        if rows.are_due and self._newest is not None:
            with self._clock.waiting():
                self._newest.token_ids()
            self._clock.accepted_known()
        rows.read()

    def _submit_drafts(self, arrays: list[mx.array]) -> None:
        """Submits the draft network's writes that belong to the step just submitted.

        They are submitted separately, because MLX might compute two networks submitted together
        at the same time, with the memory of both.
        """
        self._in_flight += arrays
        mx.async_eval(arrays)

    def wait(self) -> None:
        """Waits until the device has finished every submitted step."""
        mx.eval(self._in_flight)
