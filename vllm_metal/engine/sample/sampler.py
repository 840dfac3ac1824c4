# SPDX-License-Identifier: Apache-2.0
"""Runs the sampling stages in a fixed order and draws tokens, all lazy on the device.

Nothing here waits for the device or reads a sampled value, so a step can be submitted before the
tokens of the previous one are known. Custom processors are the exception (custom.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import mlx.core as mx
import numpy as np
from vllm import SamplingParams
from vllm.config.model import LogprobsMode

from metal_kernels.layout import PositionLag
from vllm_metal.engine.sample.bad_words import BadWords
from vllm_metal.engine.sample.constraints import AllowedTokens, LogitBias, MinTokens
from vllm_metal.engine.sample.custom import CustomProcessors, KeepingProcessors
from vllm_metal.engine.sample.distribution import MinP, Temperature, TopKTopP
from vllm_metal.engine.sample.draft_spans import DraftSpans, num_accepted
from vllm_metal.engine.sample.logit_chunks import logit_chunks, rows_at_once
from vllm_metal.engine.sample.logprobs import Logprobs, RequestedLogprobs
from vllm_metal.engine.sample.penalties import Penalties
from vllm_metal.engine.sample.random import RandomSampling
from vllm_metal.engine.sample.stage import RequestBits, SamplingStage, Step, is_random
from vllm_metal.engine.sample.transforms import apply_bitmask


def stages(
    vocab_size: int, max_num_reqs: int, custom: CustomProcessors | None
) -> tuple[SamplingStage, ...]:
    """Returns all stages in vLLM's order; they run after the grammar mask."""
    # A new stage goes to its vLLM position in this list.
    in_order = (
        AllowedTokens(vocab_size),
        BadWords(vocab_size, max_num_reqs),
        MinTokens(vocab_size, max_num_reqs),
        LogitBias(vocab_size),
        custom or None,
        Penalties(vocab_size, max_num_reqs),
        Temperature(max_num_reqs),
        MinP(max_num_reqs),
        KeepingProcessors(custom) if custom else None,
        TopKTopP(vocab_size, max_num_reqs),
    )
    return tuple(stage for stage in in_order if stage is not None)


@dataclass(frozen=True)
class GrammarMask:
    """Bit mask of the tokens that a grammar allows, in the format of vLLM's scheduler."""

    rows: np.ndarray  # int32 [M], indices into the step's logits
    bitmask: np.ndarray  # int32 [M, ceil(V/32)]; bit v % 32 of word v // 32: token v is allowed

    def of_rows(self, rows: slice) -> "GrammarMask":
        within = (self.rows >= rows.start) & (self.rows < rows.stop)
        return GrammarMask(self.rows[within] - rows.start, self.bitmask[within])


@dataclass(frozen=True)
class SamplerOutput:
    """Lazy arrays that one sampling step computes: tokens, logprobs, counts of accepted drafts."""

    token_ids: mx.array  # int32 [N]; only the first 1 + num_accepted of a span are output
    broken: mx.array  # bool [N], rows with a NaN in their logits: their tokens are meaningless
    logprobs: Logprobs | None  # per row; None if no row wants any
    last_token_ids: mx.array  # int32 [R], the newest token of each request
    num_accepted: mx.array | None  # int32 [R], drafts of each span that are output; None: no drafts

    def arrays(self) -> Iterator[mx.array]:
        yield from (self.token_ids, self.broken)
        if self.num_accepted is not None:
            yield self.num_accepted
        if self.logprobs is not None:
            yield from self.logprobs.arrays()

    @staticmethod
    def joined(parts: "Sequence[SamplerOutput]") -> "SamplerOutput":
        """Joins the outputs of a step's chunks."""
        logprobs = [part.logprobs for part in parts if part.logprobs is not None]
        accepted = [part.num_accepted for part in parts if part.num_accepted is not None]
        return SamplerOutput(
            mx.concatenate([part.token_ids for part in parts]),
            mx.concatenate([part.broken for part in parts]),
            Logprobs.joined(logprobs) if logprobs else None,
            mx.concatenate([part.last_token_ids for part in parts]),
            mx.concatenate(accepted) if accepted else None,
        )


class Sampler:
    """Samples one token per row, for requests identified by their req_idx."""

    def __init__(
        self,
        vocab_size: int,  # V, the width of the logits
        max_num_reqs: int,  # every req_idx is below it
        logprobs_mode: str = "raw_logprobs",  # vLLM's engine setting
        seed: int = 0,  # seed of the generator for requests without one
        custom: CustomProcessors | None = None,
    ) -> None:
        modes = get_args(LogprobsMode)
        if logprobs_mode not in modes:
            raise ValueError(f"logprobs_mode is {logprobs_mode!r}; use one of {', '.join(modes)}")
        self._vocab_size = vocab_size
        # Raw modes report the model's logits (after the grammar mask), processed ones the logits
        # the token was drawn from.
        self._processed_logprobs = logprobs_mode.startswith("processed")
        self._occupied: set[int] = set()
        self._stages = stages(vocab_size, max_num_reqs, custom)
        self._random = RandomSampling(max_num_reqs, seed)
        #: Reports log-probabilities rather than logits.
        self.normalizes_logprobs = logprobs_mode.endswith("logprobs")
        self._logprobs = RequestedLogprobs(
            vocab_size, max_num_reqs, normalize=self.normalizes_logprobs
        )
        self._parts = (*self._stages, self._random, self._logprobs)
        self._request_bits = RequestBits(self._parts, max_num_reqs)
        self._has_custom = bool(custom)
        self.rows_at_once = rows_at_once(vocab_size)

    @property
    def needs_host_tokens(self) -> bool:
        """Whether custom processors read `output_token_ids`, so that steps cannot overlap."""
        return self._has_custom

    def add_request(
        self,
        req_idx: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: list[int],
    ) -> None:
        """Adds a request at an empty req_idx.

        output_token_ids: all tokens that a resumed request has generated; else empty. With custom
        processors the list is kept by reference and the caller appends to it. Raises ValueError if
        the req_idx is taken.
        """
        if req_idx in self._occupied:
            raise ValueError(f"req_idx {req_idx} already holds a request; remove it first")
        self._occupied.add(req_idx)
        random = is_random(params)
        # Stages that keep the argmax do nothing for a greedy request.
        offered = [stage for stage in self._stages if random or not stage.keeps_argmax]
        self._request_bits.set_request(
            req_idx,
            [
                part
                for part in (*offered, self._random, self._logprobs)
                if part.add_request(req_idx, params, prompt_token_ids, output_token_ids)
            ],
        )

    def remove_request(self, req_idx: int) -> None:
        """Frees the req_idx of a finished or preempted request; no-op if it is free."""
        self._occupied.discard(req_idx)
        for part in self._parts:
            part.remove_request(req_idx)

    def heaviest(self) -> dict[str, Any]:
        """Returns `SamplingParams` arguments of a request that needs the most memory to sample."""
        # Without the number of logprobs, which the engine limits.
        asked = [part.heaviest() for part in self._parts]
        return {name: value for params in asked for name, value in params.items()}

    def sample(
        self,
        logits: mx.array,  # float16, bfloat16 or float32 [N, V]
        req_indices: np.ndarray,  # int32 [N], each row's request; repeats within a span only
        num_output_tokens: np.ndarray,  # int32 [N]
        grammar: GrammarMask | None = None,
        draft_spans: DraftSpans | None = None,  # None: every row is its own request
        lag: PositionLag | None = None,
    ) -> SamplerOutput:
        """Samples the next token of each row and records the output in the requests' device state.

        num_output_tokens: upper bound of the tokens generated before each row, including drafts;
        `lag` is its excess over the true number. Raises ValueError for logits or spans with
        another number of rows, and for drafts with custom processors.
        """
        if logits.shape != (len(req_indices), self._vocab_size):
            raise ValueError(
                f"logits have shape {logits.shape}; expected {(len(req_indices), self._vocab_size)}"
            )
        if draft_spans is not None and len(req_indices) != draft_spans.num_rows:
            raise ValueError(
                f"draft_spans have {draft_spans.num_rows} rows; expected {len(req_indices)}"
            )
        if len(req_indices) == 0:
            none = mx.zeros((0,), dtype=mx.int32)
            empty = none.astype(mx.bool_)
            return SamplerOutput(none, empty, None, none, None if draft_spans is None else none)
        step = self._request_bits.step(req_indices, num_output_tokens, draft_spans, lag)
        width = self._logprobs.width(step)
        # Custom processors need the whole step at once.
        if len(req_indices) <= self.rows_at_once or self._has_custom:
            return self._sample_chunk(logits, step, grammar, width)
        done: list[SamplerOutput] = []
        for rows, chunk_spans in logit_chunks(len(req_indices), draft_spans, self.rows_at_once):
            chunk = logits[rows]
            if done:  # All outputs: a later one would keep the previous chunk's logits alive.
                chunk = mx.depends(chunk, list(done[-1].arrays()))
            mask = None if grammar is None else grammar.of_rows(rows)
            chunk_step = self._request_bits.step(
                req_indices[rows],
                num_output_tokens[rows],
                chunk_spans,
                None if lag is None else lag.of(np.arange(rows.start, rows.stop)),
            )
            done.append(self._sample_chunk(chunk, chunk_step, mask, width))
        return SamplerOutput.joined(done)

    def _sample_chunk(
        self,
        logits: mx.array,
        step: Step,
        grammar: GrammarMask | None,
        logprobs_width: int | None,
    ) -> SamplerOutput:
        """Samples one chunk; logprobs_width is that of the whole step, or None."""
        # A sum is NaN if any logit is, and it takes one pass over the logits.
        broken = mx.isnan(logits.astype(mx.float32).sum(axis=-1))
        if grammar is not None and len(grammar.rows):
            logits = apply_bitmask(logits, grammar.rows, grammar.bitmask)
        used = [stage for stage in self._stages if step.uses(stage)]
        processed = logits
        for stage in used:
            processed = stage.apply(processed.astype(mx.float32), step)
        if step.uses(self._random):
            token_ids = self._random.sample(processed, step)
        else:
            token_ids = mx.argmax(processed, axis=-1).astype(mx.int32)
        last_token_ids, accepted = token_ids, None
        if step.draft_spans is not None:
            accepted = num_accepted(token_ids, step.draft_spans)
            last_token_ids = token_ids[step.draft_spans.rows.firsts + accepted]
        for stage in used:
            stage.record(token_ids, step, accepted)
        logprobs = None
        if logprobs_width is not None:
            scores = processed if self._processed_logprobs else logits
            logprobs = self._logprobs.gather(scores, token_ids, step, logprobs_width)
        return SamplerOutput(token_ids, broken, logprobs, last_token_ids, accepted)
