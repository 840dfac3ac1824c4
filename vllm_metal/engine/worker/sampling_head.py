# SPDX-License-Identifier: Apache-2.0
"""SamplingHead: the output head that samples tokens from hidden states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from vllm_metal.engine.batch import grammar
from vllm_metal.engine.batch.output_head import OutputHead
from vllm_metal.engine.batch.outputs import StepOutput
from vllm_metal.engine.sample import Logprobs, Sampler, SamplerOutput, prompt_logprob_chunks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput

    from vllm_metal.engine.batch.input_batch import InputBatch
    from vllm_metal.engine.batch.requests import Requests, RequestState
    from vllm_metal.engine.models.executor import ModelExecutor


@dataclass(frozen=True)
class _PromptRows:
    """A request's tokens that need logits for prompt logprobs."""

    state: RequestState
    start: int  # the first of them in the batch
    target_ids_np: np.ndarray  # [n] int32, the token that follows each row in the prompt; n >= 0
    last: bool  # the request samples in this step; vLLM takes them with the first token


@dataclass(frozen=True)
class _Begun:
    batch: InputBatch
    logits: mx.array  # [S, V] of the sampling rows
    prompt_rows: list[_PromptRows]
    hidden_states: mx.array | None  # states of all rows, if prompt logprobs are requested


class SamplingHead(OutputHead):
    """Samples tokens, and computes the logprobs of prompts."""

    def __init__(
        self,
        model: ModelExecutor,
        requests: Requests,
        sampler: Sampler,
        agreed: Callable[[SamplerOutput], SamplerOutput] | None = None,
    ) -> None:
        """
        Args:
            model: computes logits from hidden states.
            requests: updated with tokens once the host has read them.
            sampler: samples tokens from logits.
            agreed: maps this rank's samples to those all ranks agreed on; None for a single rank.
        """
        self._agreed = agreed
        self._model = model
        self._requests = requests
        self._sampler = sampler
        self._begun: _Begun | None = None
        #: Prompt logprobs by chunk, by req_idx of the requests that want them.
        self._prompt_logprobs: dict[int, list[Logprobs]] = {}

    @property
    def needs_host_tokens(self) -> bool:
        return self._sampler.needs_host_tokens

    def enter(self, state: RequestState) -> None:
        self._sampler.add_request(
            state.req_idx, state.sampling_params, state.prompt_token_ids, state.output_token_ids
        )
        # The scheduler gets prompt logprobs with the first token. Without output, the request is
        # new, or the step that computed them was dropped, so they are computed again.
        if state.sampling_params.prompt_logprobs is not None and not state.output_token_ids:
            self._prompt_logprobs[state.req_idx] = []

    def leave(self, req_idx: int) -> None:
        self._prompt_logprobs.pop(req_idx, None)
        self._sampler.remove_request(req_idx)

    def begin(self, batch: InputBatch, hidden_states: mx.array) -> None:
        logits = self._model.compute_logits(batch.of_logits(hidden_states))
        prompt_rows = self._prompt_rows(batch) if self._prompt_logprobs else []
        self._begun = _Begun(batch, logits, prompt_rows, hidden_states if prompt_rows else None)

    def finish(self, grammar_output: GrammarOutput | None) -> tuple[StepOutput, list[mx.array]]:
        assert self._begun is not None
        begun, self._begun = self._begun, None
        batch, logits, sampled = begun.batch, begun.logits, None
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
                batch.sample_lag,
            )
            sampled = sampled if self._agreed is None else self._agreed(sampled)
        # A chunk without a sampled token still fills the pool.
        arrays = [logits] if sampled is None else list(sampled.arrays())
        complete = self._take_prompt_logprobs(begun, sampled, arrays)
        return StepOutput(batch, sampled, complete, self._requests), arrays

    def _prompt_rows(self, batch: InputBatch) -> list[_PromptRows]:
        # The rows that predict the next prompt token.
        found = []
        sampling = set(batch.sampling_np.tolist())
        for index, state in enumerate(batch.requests):
            if state.req_idx not in self._prompt_logprobs:
                continue
            start, end = batch.query_start_loc_np[index : index + 2].tolist()
            first = int(batch.positions_np[start])
            # A prompt's last row predicts no prompt token, and may be a chunk by itself.
            count = max(min(end - start, state.num_prompt_tokens - 1 - first), 0)
            targets = np.array(state.prompt_token_ids[first + 1 : first + 1 + count], np.int32)
            found.append(_PromptRows(state, start, targets, index in sampling))
        return found

    def _take_prompt_logprobs(
        self, begun: _Begun, sampled: SamplerOutput | None, arrays: list[mx.array]
    ) -> dict[str, list[Logprobs]]:
        """Builds the prompt logprobs of this step's tokens, and adds their arrays to `arrays`.

        The samples are computed first. Returns all chunks of complete prompts by request id.
        """
        complete = {}
        after = [] if sampled is None else list(arrays)
        for rows in begun.prompt_rows:
            state = rows.state
            wanted = state.sampling_params.prompt_logprobs
            assert wanted is not None and begun.hidden_states is not None
            chunks = prompt_logprob_chunks(
                begun.hidden_states[rows.start : rows.start + len(rows.target_ids_np)],
                rows.target_ids_np,
                wanted,
                self._model.compute_logits,
                self._sampler.rows_at_once,
                after,
                normalize=self._sampler.normalizes_logprobs,
            )
            arrays += [array for chunk in chunks for array in chunk.arrays()]
            after = list(chunks[-1].arrays()) if chunks else after
            self._prompt_logprobs[state.req_idx] += chunks
            if rows.last and (done := self._prompt_logprobs.pop(state.req_idx)):
                complete[state.req_id] = done  # empty if the prompt is a single token
        return complete
