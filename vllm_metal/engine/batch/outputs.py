# SPDX-License-Identifier: Apache-2.0
"""A step's results on their way from the device to vLLM, which detokenizes them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from metal_kernels.layout import PositionLag
from vllm_metal.engine.batch.input_batch import InputBatch
from vllm_metal.engine.batch.requests import Requests
from vllm_metal.engine.sample import Logprobs, SamplerOutput
from vllm_metal.metrics.step_metrics import STEP
from vllm_metal.patches.vllm_patches.step_result import NOT_A_NUMBER, StepResult


@dataclass(frozen=True)
class Unread:
    """The previous step's sampled tokens that are still on the device, for the R requests of the
    step that is being laid out.
    """

    counts_np: np.ndarray  # [R] int32: one more than the drafts verified; 0: all tokens are known
    firsts_np: np.ndarray  # [R] int32, place in `token_ids` of each one's first; 0 without any
    token_ids: mx.array  # [S] int32, of all requests of that step
    num_rejected: mx.array  # [R] int32, how many at the end of each one's tokens are not accepted
    newest_ids: mx.array  # [R] int32, the last accepted one of each; arbitrary without any

    @cached_property
    def lag(self) -> PositionLag | None:
        """Rejected drafts that the host's token counts include; None if they are exact."""
        most_np = np.maximum(self.counts_np - 1, 0)
        return PositionLag(self.num_rejected, most_np) if np.count_nonzero(most_np) else None

    def of(self, indices_np: np.ndarray) -> Unread:
        """Restricts the unread tokens to the requests at [n] indices."""
        indices = mx.array(indices_np)
        return Unread(
            self.counts_np[indices_np],
            self.firsts_np[indices_np],
            self.token_ids,
            self.num_rejected[indices],
            self.newest_ids[indices],
        )


class StepOutput:
    """The results of one step, still on the device; vLLM reads them a step later."""

    #: Whether `get_output` waits for the device where the step has no results, too.
    always_waits = False

    def __init__(
        self,
        batch: InputBatch,
        sampled: SamplerOutput | None,
        prompt_logprobs: dict[str, list[Logprobs]],
        requests: Requests,
    ) -> None:
        """
        Args:
            batch: the step's inputs.
            sampled: None if no request of the step sampled a token.
            prompt_logprobs: request id to its chunks, for prompts that are now complete.
            requests: updated with the tokens when the host reads them.
        """
        self.batch = batch
        self.sampled = sampled
        self.prompt_logprobs = prompt_logprobs
        #: Measurements of the step, by field of StepMetrics.
        self.metrics: dict[str, float] = {}
        #: Whether an evaluation that began after this step ended has succeeded: its results are
        #: right. See `device.errors`.
        self.checked = False
        #: Seconds that reading its tokens took; None: they are not read, or there are none.
        self.wait_s: float | None = None
        self._requests = requests
        self._token_ids: list[list[int]] | None = None

    def token_ids(self) -> list[list[int]]:
        """Accepted tokens of each request; the first call waits for the device."""
        if self._token_ids is None:
            self._token_ids = [[] for _ in self.batch.requests]
            if self.sampled is not None:
                began = time.perf_counter()
                sampled = np.array(self.sampled.token_ids).tolist()
                self.wait_s = time.perf_counter() - began
                lens = self.batch.spans.lens_np.tolist()
                rows = zip(self.batch.sampling_np.tolist(), *self._accepted_rows, lens, strict=True)
                for index, start, stop, count in rows:
                    self._token_ids[index] = accepted = sampled[start:stop]
                    self._requests.append_tokens(
                        self.batch.requests[index], accepted, count - len(accepted)
                    )
        return self._token_ids

    @property
    def is_read(self) -> bool:
        """Whether the host has read the tokens."""
        return self._token_ids is not None

    def unread(self, req_indices_np: np.ndarray) -> Unread | None:
        """Returns tokens that this step sampled for requests of a later step; None: there are none.

        Only tokens that the host has not read from the device yet. All other steps must have been
        read.

        req_indices_np: [R] int32, req_idx of the later step's requests.
        """
        requests, sampled = self._requests, self.sampled
        if self.is_read or sampled is None:
            return None
        pending = requests.have_unread_np(req_indices_np)
        own = self.batch.req_indices_np[self.batch.sampling_np]
        spans = self.batch.spans
        lens, starts = spans.lens_np, spans.starts_np
        accepted, newest = sampled.num_accepted, sampled.last_token_ids
        num_pending = np.count_nonzero(pending)
        # In most steps:
        if num_pending == len(pending) and req_indices_np.tobytes() == own.tobytes():
            rejected = mx.zeros_like(newest) if accepted is None else spans.lasts - accepted
            return Unread(lens, starts[:-1], sampled.token_ids, rejected, newest)
        if not num_pending:
            return None
        # A request that has left and returned has another row, where nothing is pending.
        place = np.zeros(len(requests.num_tokens_np), np.int32)
        place[own] = np.arange(len(own))
        place = place[req_indices_np]
        counts = np.where(pending, lens[place], 0).astype(np.int32)
        there = mx.array(place)
        rejected = mx.zeros(len(counts), mx.int32)
        if (counts > 1).any():
            assert accepted is not None
            # None of one token can be rejected, nor of a request that is not in both steps.
            rejected = mx.maximum(mx.array(np.maximum(counts - 1, 0)) - accepted[there], 0)
        firsts = np.where(pending, starts[place], 0).astype(np.int32)
        return Unread(counts, firsts, sampled.token_ids, rejected, newest[there])

    def num_accepted(self) -> np.ndarray:
        """[N] int32, accepted drafts of each sampling request; waits for the device."""
        return self._num_accepted_np

    @cached_property
    def _num_accepted_np(self) -> np.ndarray:
        if self.sampled is None or self.sampled.num_accepted is None:
            return np.zeros(len(self.batch.sampling_np), np.int32)
        return np.array(self.sampled.num_accepted)

    def last_rows_np(self) -> np.ndarray:
        """[R] int32, batch index of each request's last accepted token; waits for the device."""
        rows = self.batch.query_start_loc_np[1:] - 1
        if self.batch.num_drafts_np is not None:
            sampling = self.batch.sampling_np
            rows[sampling] -= self.batch.num_drafts_np[sampling] - self.num_accepted()
        return rows

    @property
    def _accepted_rows(self) -> tuple[list[int], list[int]]:
        """Start of each sampling request's sampled tokens, and the end of its accepted ones.

        Waits for the device.
        """
        starts_np = self.batch.spans.starts_np[:-1]
        return starts_np.tolist(), (starts_np + 1 + self._num_accepted_np).tolist()

    def _failures(self) -> dict[str, str]:
        """Maps request id to why its token is invalid."""
        if self.sampled is None or not (broken := np.array(self.sampled.broken)).any():
            return {}
        of_request = np.logical_or.reduceat(broken, self._accepted_rows[0])
        return {
            self.batch.requests[index].req_id: NOT_A_NUMBER
            for index in self.batch.sampling_np[of_request].tolist()
        }

    def get_output(self) -> StepResult:
        """Returns the step's results in vLLM's format; waits for the device."""
        token_ids = self.token_ids()
        req_ids = [state.req_id for state in self.batch.requests]
        logprobs = None
        if self.sampled is not None and self.sampled.logprobs is not None:
            logprobs = self.sampled.logprobs.to_lists()
            if self.batch.draft_spans is not None:
                accepted = zip(*self._accepted_rows, strict=True)
                rows = np.concatenate([np.arange(start, stop) for start, stop in accepted])
                logprobs = logprobs._replace(
                    logprob_token_ids=logprobs.logprob_token_ids[rows],
                    logprobs=logprobs.logprobs[rows],
                    sampled_token_ranks=logprobs.sampled_token_ranks[rows],
                )
            # First row of each request, whether or not it has any, and the end.
            first_rows = [0, *np.cumsum([len(ids) for ids in token_ids]).tolist()]
            logprobs = logprobs._replace(cu_num_generated_tokens=first_rows)
        failures = self._failures()
        return StepResult(
            req_ids=req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
            sampled_token_ids=[
                [] if req_id in failures else ids
                for req_id, ids in zip(req_ids, token_ids, strict=True)
            ]
            if failures
            else token_ids,
            logprobs=logprobs,
            prompt_logprobs_dict={
                req_id: _tensors(parts)
                for req_id, parts in self.prompt_logprobs.items()
                if req_id not in failures
            },
            failures=failures,
            metrics={STEP: self.metrics},
        )


def _tensors(parts: list[Logprobs]) -> LogprobsTensors:
    """Joins a prompt's chunks of logprobs into the tensors that vLLM expects."""
    lists = [part.to_lists() for part in parts]
    return LogprobsTensors(
        torch.from_numpy(np.concatenate([part.logprob_token_ids for part in lists])),
        torch.from_numpy(np.concatenate([part.logprobs for part in lists])),
        torch.from_numpy(np.concatenate([part.sampled_token_ranks for part in lists])),
    )
