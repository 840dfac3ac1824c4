# SPDX-License-Identifier: Apache-2.0
"""The sampler: a fixed sequence of transforms from logits to tokens, all lazy on the device.

Nothing here waits for the device or reads a sampled value, so a step can be submitted before the
tokens of the previous one are known. Custom processors are the exception (custom.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import mlx.core as mx
import numpy as np
from vllm import SamplingParams
from vllm.config.model import LogprobsMode

from vllm_metal.sample.bad_words import BadWords
from vllm_metal.sample.constraints import Constraints
from vllm_metal.sample.custom import CustomProcessors
from vllm_metal.sample.draft_spans import DraftSpans, num_accepted
from vllm_metal.sample.logit_chunks import logit_chunks, rows_at_once
from vllm_metal.sample.logprobs import Logprobs, gather_logprobs, token_id_rows
from vllm_metal.sample.penalties import Penalties
from vllm_metal.sample.random import RowKeys, draw
from vllm_metal.sample.state import NO_LOGPROBS, Feature, ParameterTable, Step
from vllm_metal.sample.transforms import apply_bitmask, keep_min_p, keep_top_k_top_p


@dataclass(frozen=True)
class GrammarMask:
    """Tokens a grammar allows, as vLLM's scheduler sends them.

    rows: int32 [M], indices into the step's logits. bitmask: int32 [M, ceil(V/32)], bit v % 32 of
    word v // 32 set means token v is allowed. Owned by the caller, read during `Sampler.sample`.
    """

    rows: np.ndarray
    bitmask: np.ndarray

    def of_rows(self, rows: slice) -> "GrammarMask":
        """The mask of a chunk of the step."""
        within = (self.rows >= rows.start) & (self.rows < rows.stop)
        return GrammarMask(self.rows[within] - rows.start, self.bitmask[within])


@dataclass(frozen=True)
class SamplerOutput:
    """What a step sampled, all of it lazy.

    token_ids: int32 [N], by row. Of a span only the first 1 + num_accepted are output.
    broken: bool [N], rows whose logits hold a NaN: what they sampled means nothing.
    logprobs: by row; None when no row asked for any.
    last_token_ids: int32 [R], the newest token of each request.
    num_accepted: int32 [R], drafts of each span that are output; None without draft_spans.
    """

    token_ids: mx.array
    broken: mx.array
    logprobs: Logprobs | None
    last_token_ids: mx.array
    num_accepted: mx.array | None

    def arrays(self) -> Iterator[mx.array]:
        """All of it, for the device to compute."""
        yield from (self.token_ids, self.broken)
        if self.num_accepted is not None:
            yield self.num_accepted
        if self.logprobs is not None:
            yield from self.logprobs.arrays()

    @staticmethod
    def joined(parts: "Sequence[SamplerOutput]") -> "SamplerOutput":
        """The outputs of a step's chunks as the step's."""
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
    """Samples one token per row, for requests kept in req_indices.

    vocab_size: V, the width of the logits. max_num_reqs: req_indices are in [0, max_num_reqs).
    logprobs_mode: vLLM's engine setting; raw modes report the model's logits (after the grammar
    mask), processed ones what the token was drawn from. seed: of the engine's own generator, which
    serves requests without one. custom: user-written processors, if any.
    """

    def __init__(
        self,
        vocab_size: int,
        max_num_reqs: int,
        logprobs_mode: str = "raw_logprobs",
        seed: int = 0,
        custom: CustomProcessors | None = None,
    ) -> None:
        modes = get_args(LogprobsMode)
        if logprobs_mode not in modes:
            raise ValueError(f"logprobs_mode is {logprobs_mode!r}; use one of {', '.join(modes)}")
        self._vocab_size = vocab_size
        self._processed_logprobs = logprobs_mode.startswith("processed")
        self._normalise_logprobs = logprobs_mode.endswith("logprobs")
        self._parameters = ParameterTable(vocab_size, max_num_reqs)
        self._occupied: set[int] = set()
        self._constraints = Constraints(vocab_size)
        self._penalties = Penalties(vocab_size, max_num_reqs)
        self._bad_words = BadWords(vocab_size, max_num_reqs)
        self._logprob_token_ids: dict[int, np.ndarray] = {}
        self._keys = RowKeys(seed)
        self._custom = custom if custom else None
        self.rows_at_once = rows_at_once(vocab_size)

    @property
    def needs_host_tokens(self) -> bool:
        """Whether the tokens of earlier steps must be in the `output_token_ids` lists before
        `sample` is called: only with custom processors. It rules out overlapping steps."""
        return self._custom is not None

    def add(
        self,
        req_idx: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: list[int],
    ) -> None:
        """Takes a request into an empty req_idx.

        output_token_ids: what a resumed request has generated, all of it; else empty. With custom
        processors the list is kept by reference and the caller appends to it.
        Raises ValueError if the req_idx is taken.
        """
        if req_idx in self._occupied:
            raise ValueError(f"req_idx {req_idx} already holds a request; remove it first")
        self._occupied.add(req_idx)
        features = self._parameters.add(req_idx, params)
        self._constraints.add(req_idx, params, features)
        if Feature.PENALTIES in features:
            self._penalties.add(req_idx, prompt_token_ids, output_token_ids)
        if Feature.BAD_WORDS in features:
            self._bad_words.add(req_idx, params.bad_words_token_ids or [], output_token_ids)
        if Feature.LOGPROB_TOKEN_IDS in features:
            self._logprob_token_ids[req_idx] = np.asarray(params.logprob_token_ids, dtype=np.int64)
        if self._custom is not None:
            self._custom.add(req_idx, params, prompt_token_ids, output_token_ids)

    def remove(self, req_idx: int) -> None:
        """Empties a req_idx (finished or preempted request); an empty req_idx stays empty."""
        self._occupied.discard(req_idx)
        self._constraints.remove(req_idx)
        self._penalties.remove(req_idx)
        self._bad_words.remove(req_idx)
        self._logprob_token_ids.pop(req_idx, None)
        if self._custom is not None:
            self._custom.remove(req_idx)

    def sample(
        self,
        logits: mx.array,
        req_indices: np.ndarray,
        num_output_tokens: np.ndarray,
        grammar: GrammarMask | None = None,
        draft_spans: DraftSpans | None = None,
    ) -> SamplerOutput:
        """Samples the next token of each row and records what is output in the requests' device
        state.

        logits: float16, bfloat16 or float32 [N, V]. req_indices: int32 [N], each row's request,
        which repeats within a span only. num_output_tokens: int32 [N], tokens each request
        generated before this one, also those the host has not seen yet, and the drafts before the
        row. draft_spans: the drafts to verify; None: every row is a request of its own.
        Raises ValueError if the logits' shape is not [rows, vocab_size], if the spans have
        another number of rows, and if there are drafts and custom processors.
        """
        if logits.shape != (len(req_indices), self._vocab_size):
            raise ValueError(
                f"logits have shape {logits.shape}; expected {(len(req_indices), self._vocab_size)}"
            )
        if draft_spans is not None and len(req_indices) != len(draft_spans.offsets_np):
            raise ValueError(
                f"draft_spans have {len(draft_spans.offsets_np)} rows; expected {len(req_indices)}"
            )
        if len(req_indices) == 0:
            none = mx.zeros((0,), dtype=mx.int32)
            empty = none.astype(mx.bool_)
            return SamplerOutput(none, empty, None, none, None if draft_spans is None else none)
        step = self._parameters.step(req_indices, num_output_tokens, draft_spans)
        # Custom processors take a step as a whole.
        if len(req_indices) <= self.rows_at_once or self._custom is not None:
            return self._sample_chunk(logits, step, grammar, step.num_logprobs)
        done: list[SamplerOutput] = []
        for rows, of_rows in logit_chunks(len(req_indices), draft_spans, self.rows_at_once):
            chunk = logits[rows]
            if done:  # all of the chunk before, or what is left of it would hold its copies
                chunk = mx.depends(chunk, list(done[-1].arrays()))
            mask = None if grammar is None else grammar.of_rows(rows)
            of_chunk = self._parameters.step(req_indices[rows], num_output_tokens[rows], of_rows)
            done.append(self._sample_chunk(chunk, of_chunk, mask, step.num_logprobs))
        return SamplerOutput.joined(done)

    def _sample_chunk(
        self, logits: mx.array, step: Step, grammar: GrammarMask | None, num_logprobs: int
    ) -> SamplerOutput:
        """See `sample`; num_logprobs: the most that any row of the whole step asked for."""
        draft_spans = step.draft_spans
        broken = mx.isnan(logits.astype(mx.float32).sum(axis=-1))
        if grammar is not None and len(grammar.rows):
            logits = apply_bitmask(logits, grammar.rows, grammar.bitmask)
        processed = self._constrain(logits, step)
        if step.uses(Feature.PENALTIES):
            processed = self._penalties.apply(processed.astype(mx.float32), step)
        if step.uses(Feature.RANDOM):
            processed = self._shape_distribution(processed.astype(mx.float32), step)
            token_ids = draw(processed, self._keys.keys(step), _noise_scale(step))
        else:
            token_ids = mx.argmax(processed, axis=-1).astype(mx.int32)
        last_token_ids, accepted = token_ids, None
        if draft_spans is not None:
            accepted = num_accepted(token_ids, draft_spans)
            last_token_ids = token_ids[mx.array(draft_spans.starts_np) + accepted]
        self._record(token_ids, step, accepted)
        scores = processed if self._processed_logprobs else logits
        logprobs = self._logprobs(scores, token_ids, step, num_logprobs)
        return SamplerOutput(token_ids, broken, logprobs, last_token_ids, accepted)

    def _constrain(self, logits: mx.array, step: Step) -> mx.array:
        """What may change the most likely token, except penalties; any float in, and out where
        nothing was done."""
        if step.uses(Feature.ALLOWED_TOKENS):
            logits = self._constraints.apply_allowed(logits, step)
        if step.uses(Feature.BAD_WORDS):
            logits = self._bad_words.apply(logits.astype(mx.float32), step)
        if step.uses(Feature.MIN_TOKENS):
            logits = self._constraints.apply_min_tokens(logits.astype(mx.float32), step)
        if step.uses(Feature.LOGIT_BIAS):
            logits = self._constraints.apply_logit_bias(logits.astype(mx.float32), step)
        if self._custom is not None:
            self._custom.begin_step(step)
            if self._custom.change_argmax:
                logits = self._custom.apply_changing_argmax(logits.astype(mx.float32), step)
        return logits

    def _shape_distribution(self, logits: mx.array, step: Step) -> mx.array:
        """Temperature, min_p, top_k, top_p; neutral on greedy rows, whose argmax they keep."""
        logits = logits / mx.array(step.column("temperature"))
        if step.uses(Feature.MIN_P):
            logits = keep_min_p(logits, mx.array(step.column("min_p")))
        if self._custom is not None and self._custom.keep_argmax:
            logits = self._custom.apply_keeping_argmax(logits, step)
        if step.uses(Feature.TOP_K | Feature.TOP_P):
            top_p = step.column("top_p") if step.uses(Feature.TOP_P) else None
            logits = keep_top_k_top_p(logits, step.column("top_k"), top_p)
        return logits

    def _record(self, token_ids: mx.array, step: Step, accepted: mx.array | None) -> None:
        if step.uses(Feature.PENALTIES):
            self._penalties.record(token_ids, step, accepted)
        if step.uses(Feature.BAD_WORDS):
            self._bad_words.record(token_ids, step, accepted)

    def _logprobs(
        self, scores: mx.array, token_ids: mx.array, step: Step, width: int
    ) -> Logprobs | None:
        if width == NO_LOGPROBS:
            return None
        instead = token_id_rows(step, self._logprob_token_ids, width, self._vocab_size)
        return gather_logprobs(
            scores, token_ids, width, normalise=self._normalise_logprobs, instead=instead
        )


def _noise_scale(step: Step) -> np.ndarray | None:
    """float32 [N, 1]: 1 on random rows, 0 on greedy ones; None if every row is random."""
    random = (step.rows["features"] & np.uint32(Feature.RANDOM)) != 0
    return None if random.all() else random.astype(np.float32)[:, None]
