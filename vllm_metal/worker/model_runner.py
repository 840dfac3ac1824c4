# SPDX-License-Identifier: Apache-2.0
"""Orders the calls of one step: update requests, prepare inputs, forward, sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from vllm.v1.outputs import DraftTokenIds

from vllm_metal.batch import grammar
from vllm_metal.batch.drafts import StepDrafts
from vllm_metal.batch.input_batch import InputBatch, prepare
from vllm_metal.batch.outputs import StepOutput, Unread
from vllm_metal.batch.requests import Requests, RequestState
from vllm_metal.sample import Logprobs, Sampler, SamplerOutput, prompt_logprob_chunks
from vllm_metal.spec_decode.speculator import Speculator

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

    from vllm_metal.models.executor import ModelExecutor
    from vllm_metal.models.paged_layers import PagedLayers
    from vllm_metal.spec_decode.draft_writer import DraftWriter


@dataclass(frozen=True)
class _Forwarded:
    """A forward pass, built and not yet sampled from."""

    batch: InputBatch
    logits: mx.array  # [S, V] of the rows that sample
    hidden_states: mx.array | None  # of all rows, where prompt logprobs are wanted


class ModelRunner:
    """Turns one SchedulerOutput into tokens.

    Nothing between `update_requests` and the hand-over to the device at the end of `sample_tokens`
    waits for the device, except where the KV pool is written by MLX's scatter: the step before must
    then have read it when the next writes are queued (see kv_cache.scatter). Custom logits
    processors add a wait of their own: they read the tokens of the step before. With speculation
    `learn` waits before all that, where `_needs_outcome` says so.
    """

    def __init__(
        self,
        model: ModelExecutor,
        requests: Requests,
        sampler: Sampler,
        max_num_reqs: int,
        speculator: Speculator | None = None,
        draft_writer: DraftWriter | None = None,
    ) -> None:
        """
        Args:
            model: what computes logits.
            requests: all that persists of them.
            sampler: makes tokens of logits.
            max_num_reqs: rows of the per-request tables.
            speculator: None where nothing is drafted.
            draft_writer: keeps the K/V of a draft network that others draft from; not beside a
                speculator.
        """
        self._model = model
        self._requests = requests
        self._sampler = sampler
        self._speculator = speculator
        self._draft_writer = draft_writer
        self._last_token_ids = mx.zeros(max_num_reqs, mx.int32)  # by req_idx, the newest token
        self._forwarded: _Forwarded | None = None
        self._newest: StepOutput | None = None  # the step handed over last
        #: How often a step waited to know what the step before it sampled.
        self.num_waits = 0
        self._unlearnt: list[StepOutput] = []  # with speculation; the newest last, two at most
        self._in_flight: list[mx.array] = []  # its arrays
        self._joining: list[mx.array] = []  # what else the device computes with the step at hand

    def twin(self, sampler: Sampler) -> ModelRunner:
        """A runner over the same networks, pool and requests. This one learns nothing of its steps.

        It does not draft where drafts are made of text: these take no passes of a network.

        Args:
            sampler: that it samples with.
        """
        speculator = self._speculator
        if speculator is not None:
            speculator = None if speculator.reads_text else speculator.twin()
        max_num_reqs = self._last_token_ids.size
        return ModelRunner(
            self._model, self._requests, sampler, max_num_reqs, speculator, self._draft_writer
        )

    @property
    def num_drafts(self) -> int:
        """The most drafts of a request in a step."""
        return 0 if self._speculator is None else self._speculator.num_drafts

    @property
    def layers(self) -> PagedLayers:
        """The target's layers over the pool."""
        return self._model

    def join_step(self, arrays: Sequence[mx.array]) -> None:
        """Has the device compute these, too, when it is given the step that is being built."""
        self._joining += arrays

    def settle_drafts(self, ends: Mapping[str, int]) -> None:
        """Completes what blocks hold, also of requests that will not draft again.

        Args:
            ends: by request id, how many of its tokens must have their K/V.
        """
        if self._model.rolls_back:
            self.learn()  # a state is in its block once it is known which drafts were kept
        if self._speculator is not None:
            self._speculator.settle(ends)

    def settle_leaving(self, scheduler_output: SchedulerOutput) -> None:
        """The same of requests that this step takes away: their blocks may be found later.

        One that is taken away at the end of its turn of a session goes on behind its last token.
        """
        if self._speculator is None:
            return
        paused = scheduler_output.preempted_req_ids or set()
        self._speculator.settle_blocks(scheduler_output.finished_req_ids, self._model.block_size)
        self._speculator.settle_blocks(paused, 1)

    def learn(self, scheduler_output: SchedulerOutput | None = None) -> None:
        """Takes the outcome of earlier steps where there is speculation.

        That of the newest step only where the host must know it, for which it waits; that of all
        others in any case, which vLLM has read.

        Args:
            scheduler_output: of the step that is to be laid out; None: the host must know it.
        """
        if self._speculator is None or not self._unlearnt:
            return
        newest = self._unlearnt[-1]
        needed = scheduler_output is None or self._needs_outcome(scheduler_output)
        due = self._unlearnt if needed or newest.is_read else self._unlearnt[:-1]
        self._unlearnt = self._unlearnt[len(due) :]
        self.num_waits += sum(not output.is_read for output in due)
        self._speculator.learn(due)
        if self._model.rolls_back:
            self._model.restore(newest.last_rows_np())

    def _needs_outcome(self, scheduler_output: SchedulerOutput) -> bool:
        """Whether a step can be laid out only when the host knows what the step before sampled.

        Else it is laid out from upper bounds: how many drafts were rejected, the device knows.
        """
        assert self._speculator is not None
        return (
            self._speculator.reads_text
            or not self._model.pipelined  # it waits in any case
            or self._model.rolls_back  # the state is put right before it is used
            or scheduler_output.has_structured_output_requests  # masks are made of known drafts
            or scheduler_output.kv_connector_metadata is not None  # what is stored must be complete
        )

    def update_requests(self, scheduler_output: SchedulerOutput) -> dict[str, Exception]:
        """Takes the scheduler's news: requests that came, went, resumed, or got on.

        Returns:
            By request id the errors of those that could not be taken. They have no row in any
            table; of no other request anything is lost. What this runner keeps of them, a custom
            logits processor's state say, may be anything: it is to be made anew.
        """
        changes = self._requests.apply(scheduler_output)
        failed = dict(changes.failed)
        for state in changes.left:
            try:
                self._forget(state)
            except Exception as error:
                failed[state.req_id] = error
        for state in changes.entered:
            try:
                self._take_in(state)
            except Exception as error:
                failed[state.req_id] = error
                self._requests.remove_request(state.req_id)
        return failed

    def _forget(self, state: RequestState) -> None:
        self._sampler.remove_request(state.req_idx)
        if self._speculator is not None:
            self._speculator.forget_request(state.req_idx)

    def _take_in(self, state: RequestState) -> None:
        if self._speculator is not None:
            self._speculator.begin_request(state)
        self._sampler.add_request(
            state.req_idx,
            state.sampling_params,
            state.prompt_token_ids,
            state.output_token_ids,
        )

    def update_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Clears and copies blocks as the scheduler wants, also where it schedules nothing."""
        zeroed, copied = (
            scheduler_output.new_block_ids_to_zero,
            scheduler_output.kv_cache_block_copies,
        )
        if zeroed or copied:
            self._model.update_blocks(zeroed or (), copied or ())

    def forward(self, scheduler_output: SchedulerOutput) -> None:
        """Builds the forward pass of a step's requests; its logits wait for `sample_tokens`."""
        drafts = behind = None
        if self._speculator is not None:
            if not self._model.pipelined:
                self.wait()  # draft passes scatter at once, after the step before has read all
            self._requests.roll_back()
            unread = self._unread(scheduler_output)
            behind = None if unread is None else unread.behind
            drafts = self._speculator.step_drafts(
                scheduler_output.num_scheduled_tokens,
                scheduler_output.scheduled_spec_decode_tokens,
                unread,
            )
            # vLLM's scheduler keeps this object, and reads its figures from it after the step.
            scheduler_output.num_invalid_spec_tokens = _left_out(scheduler_output, drafts)
        batch = prepare(
            self._requests,
            scheduler_output.num_scheduled_tokens,
            self._last_token_ids,
            drafts,
            behind,
        )
        hidden_states = self._model.forward_hidden(batch, self._requests.block_tables)
        logits = self._model.compute_logits(batch.of_logits(hidden_states))
        if self._speculator is not None:
            self._speculator.take_hidden(batch)
        self._forwarded = _Forwarded(batch, logits, hidden_states if batch.prompt_rows else None)

    def _unread(self, scheduler_output: SchedulerOutput) -> Unread | None:
        """What the host has not read of the requests of the step that is being laid out."""
        if self._newest is None:
            return None
        req_ids = scheduler_output.num_scheduled_tokens
        req_indices = [self._requests[req_id].req_idx for req_id in req_ids]
        return self._newest.unread(np.array(req_indices, np.int32))

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> StepOutput:
        """Samples from the forward pass just built and hands the step to the device."""
        assert self._forwarded is not None
        forwarded, self._forwarded = self._forwarded, None
        batch, logits = forwarded.batch, forwarded.logits
        if self._sampler.needs_host_tokens and self._newest is not None:
            self._newest.token_ids()
        sampled = None
        if len(batch.sampling_np):
            mask = None
            if grammar_output is not None:
                mask, batch = grammar.match_grammar_mask(batch, grammar_output)
            sampled = self._sampler.sample(
                logits,
                batch.sample_req_indices_np,
                batch.num_output_tokens_np,
                mask,
                batch.draft_spans,
                batch.sample_behind,
            )
            req_indices = batch.req_indices_np[batch.sampling_np]
            # A new array: writing into this one would make the step before stand for this step.
            self._last_token_ids = mx.put_along_axis(
                self._last_token_ids, mx.array(req_indices), sampled.last_token_ids, axis=0
            )
            spans = batch.draft_spans
            self._requests.note_sampled(req_indices, 1 if spans is None else spans.lens_np)
        chunks, complete = self._prompt_logprobs(forwarded, sampled)
        output = StepOutput(batch, sampled, complete, self._requests)
        if self._speculator is not None:
            self._unlearnt.append(output)
        self._submit(output, chunks, logits)
        if self._draft_writer is not None:
            self._submit_drafts(self._draft_writer.write(forwarded.batch, self._last_token_ids))
        self._newest = output
        return output

    def _prompt_logprobs(
        self, forwarded: _Forwarded, sampled: SamplerOutput | None
    ) -> tuple[list[Logprobs], dict[str, list[Logprobs]]]:
        """Prompt logprobs of this step's rows.

        Returns:
            This step's chunks, and by request id all chunks of those whose prompt is complete.
        """
        chunks: list[Logprobs] = []
        complete = {}
        after = [] if sampled is None else list(sampled.arrays())
        for rows in forwarded.batch.prompt_rows:
            state = rows.state
            wanted = state.sampling_params.prompt_logprobs
            assert wanted is not None and state.prompt_logprobs is not None
            assert forwarded.hidden_states is not None
            found = prompt_logprob_chunks(
                forwarded.hidden_states[rows.start : rows.start + len(rows.target_ids_np)],
                rows.target_ids_np,
                wanted,
                self._model.compute_logits,
                self._sampler.rows_at_once,
                after,
                normalise=self._sampler.normalises_logprobs,
            )
            state.prompt_logprobs += found
            chunks += found
            after = list(chunks[-1].arrays()) if chunks else after
            if rows.last:
                if state.prompt_logprobs:  # none where the prompt is a single token
                    complete[state.req_id] = state.prompt_logprobs
                state.prompt_logprobs = None
        return chunks, complete

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts for vLLM's scheduler to reserve rows for; None without speculation.

        Where it plans ahead they are those of the step already laid out, which it asks for to check
        them against grammars; else those that follow the newest step.
        """
        if self._speculator is None or self._newest is None:
            return None
        if self._forwarded is not None:
            drafts = self._speculator.laid_out_drafts()
        else:
            self.learn()
            drafts = self._speculator.drafts_after(self._newest.batch)
        return DraftTokenIds(list(drafts), list(drafts.values()))

    def _submit(self, output: StepOutput, chunks: list[Logprobs], logits: mx.array) -> None:
        """Hands the step to the device, where the pool wants it once the step before is over."""
        if not self._model.pipelined:
            self.wait()
        self._in_flight = [
            *output.arrays(),
            *(array for chunk in chunks for array in chunk.arrays()),
            self._last_token_ids,
            *self._joining,
        ]
        self._joining = []
        if output.sampled is None:
            self._in_flight.append(logits)  # a chunk that yields no token still fills the pool
        mx.async_eval(self._in_flight)

    def _submit_drafts(self, arrays: list[mx.array]) -> None:
        """Hands over what a draft network writes with the step that was handed over last.

        By itself, or MLX might compute both networks side by side, with the memory of both.
        """
        self._in_flight += arrays
        mx.async_eval(arrays)

    def wait(self) -> None:
        """Blocks until the device has finished every step handed to it."""
        mx.eval(self._in_flight)


def _left_out(scheduler_output: SchedulerOutput, drafts: StepDrafts) -> dict[str, int]:
    """By request id, rows reserved for drafts that got none: vLLM's figures leave them out."""
    missing = (drafts.reserved_np - drafts.counts_np).tolist()
    req_ids = scheduler_output.num_scheduled_tokens
    return {req_id: count for req_id, count in zip(req_ids, missing, strict=True) if count}
