# SPDX-License-Identifier: Apache-2.0
"""One step's inputs, built once from the per-request tables and never changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import numpy as np

from metal_kernels.layout import PositionLag, RaggedRows
from vllm_metal.engine.batch.requests import Requests, RequestState
from vllm_metal.engine.batch.rows import Rows, device_positions
from vllm_metal.engine.sample import DraftSpans


@dataclass(frozen=True)
class StepDrafts:
    """The drafts that a step verifies, for each of its R requests in order."""

    token_ids: mx.array  # int32 [R, K]; past a request's count arbitrary
    counts_np: np.ndarray  # int32 [R], drafts of each, at most what is reserved
    reserved_np: np.ndarray  # int32 [R], rows the scheduler set aside for drafts
    copied_np: np.ndarray | None = None  # bool [R], drafts that are copied, not guessed; None: none

    def blocks(self, scheduled_np: np.ndarray) -> mx.array | None:
        """[R, k] int32, the drafts of a step of one token and k > 0 drafts per request, else None.

        `scheduled_np` is [R] int32, each request's tokens in the step, drafts included.
        """
        count = int(self.counts_np[0])
        if not count or {*self.counts_np.tolist()} != {count}:
            return None
        if {*scheduled_np.tolist()} != {count + 1}:
            return None
        return self.token_ids if count == self.token_ids.shape[1] else self.token_ids[:, :count]

    def unused(self, req_ids: Iterable[str]) -> dict[str, int]:
        """Maps request ids to reserved rows without a draft; omits requests that use all rows."""
        counts = (self.reserved_np - self.counts_np).tolist()
        return {req_id: count for req_id, count in zip(req_ids, counts, strict=True) if count}


@dataclass(frozen=True, kw_only=True)
class InputBatch(Rows):
    """A step's scheduled tokens, and after which of them it samples.

    A request's drafts are its last tokens. They and the token before them are the request's draft
    span: the step samples after each token of the span.
    """

    requests: list[RequestState]  # [R]
    sampling_np: np.ndarray  # [N] int32, requests (indices into [R]) that sample a token
    spans: RaggedRows  # rows that sample, of these N: one, and one for each draft
    sample_req_indices_np: np.ndarray  # [S] int32, of each row that samples
    # [S] int32, generated before that row, drafts included; an upper bound as positions are.
    num_output_tokens_np: np.ndarray
    sample_lag: PositionLag | None  # lag of these rows' positions; None: they are exact
    draft_spans: DraftSpans | None  # spans of the rows that sample; None: one row each
    drafts: StepDrafts | None  # drafts of all requests; None: without speculation


def prepare(
    requests: Requests,
    num_scheduled_tokens: dict[str, int],
    last_token_ids: mx.array,
    drafts: StepDrafts | None = None,
    lag: PositionLag | None = None,
) -> InputBatch:
    """Lays the scheduled requests out as one ragged batch.

    Args:
        requests: updated with this step's scheduler output.
        num_scheduled_tokens: request id to its number of tokens in this step.
        last_token_ids: [max_num_reqs] int32, newest token by req_idx, on the device; used where
            the host does not know a token yet.
        drafts: the scheduled requests' drafts, in the same order.
        lag: lag of the scheduled requests; None: the host knows how many tokens each has.
    """
    scheduled_requests = [requests[req_id] for req_id in num_scheduled_tokens]
    req_indices = np.fromiter(
        (state.req_idx for state in scheduled_requests), np.int32, len(scheduled_requests)
    )
    scheduled = np.fromiter(num_scheduled_tokens.values(), np.int32, len(scheduled_requests))
    num_drafts = np.zeros(len(scheduled_requests), np.int32)
    if drafts is not None:
        num_drafts = drafts.counts_np
        scheduled += num_drafts - drafts.reserved_np
    computed = requests.num_computed_tokens_np[req_indices]
    rows = RaggedRows.of(scheduled)
    owner, positions = rows.groups_np, computed[rows.groups_np] + rows.offsets_np
    num_tokens_before = requests.num_tokens_np[req_indices]
    seq_lens = computed + scheduled
    sampling = np.flatnonzero(seq_lens - num_drafts == num_tokens_before).astype(np.int32)
    blocks = None
    if drafts is not None and len(sampling) == len(scheduled_requests):
        blocks = drafts.blocks(scheduled)
    if blocks is not None:
        newest = _newest_ids(requests, req_indices, num_tokens_before - 1, last_token_ids)
        input_ids = mx.concatenate([newest[:, None], blocks], axis=1).flatten()
    else:
        given = req_indices[owner], positions, last_token_ids
        indices = positions - num_tokens_before[owner]
        input_ids = _ragged_ids(requests, *given, drafts, owner, indices)
    ends = rows.starts_np[sampling + 1]
    sampled = _SampledRows.of(sampling, ends, num_drafts, drafts, blocks)
    owners = sampled.owners
    num_outputs = num_tokens_before - requests.num_prompt_tokens_np[req_indices]
    everything = len(sampled.rows) == len(positions)
    return InputBatch(
        requests=scheduled_requests,
        req_indices_np=req_indices,
        query_start_loc_np=rows.starts_np,
        seq_lens_np=seq_lens,
        positions_np=positions,
        positions=device_positions(positions, rows, lag),
        input_ids=input_ids,
        sampling_np=sampling,
        spans=sampled.spans,
        sample_req_indices_np=req_indices[owners],
        num_output_tokens_np=(num_outputs[owners] + sampled.spans.offsets_np).astype(np.int32),
        sample_lag=None if lag is None else lag.of(owners),
        draft_spans=sampled.draft_spans,
        drafts=drafts,
        logits_indices=None if everything else mx.array(sampled.rows.astype(np.int32)),
        num_drafts_np=num_drafts if np.count_nonzero(num_drafts) else None,
        lag=lag,
    )


@dataclass(frozen=True)
class _SampledRows:
    """The S tokens after which a step samples: each such request's last token and its drafts."""

    spans: RaggedRows  # the S rows, by request that samples
    owners: np.ndarray  # [S] indices of their requests in the step
    rows: np.ndarray  # [S] indices of the step's rows
    draft_spans: DraftSpans | None  # None: one row each

    @staticmethod
    def of(
        sampling: np.ndarray,
        ends: np.ndarray,
        num_drafts: np.ndarray,
        drafts: StepDrafts | None,
        blocks: mx.array | None = None,
    ) -> _SampledRows:
        """
        Args:
            sampling: [N] indices of the requests that sample.
            ends: [N] one past each sampling request's last batch index.
            num_drafts: [R] number of drafts of each of the step's requests.
            drafts: the step's drafts.
            blocks: `StepDrafts.blocks`.
        """
        lens = 1 + num_drafts[sampling]
        spans = RaggedRows.of(lens)
        span, in_span = spans.groups_np, spans.offsets_np
        owners, draft_spans = sampling[span], None
        if drafts is not None and len(span) > len(sampling):
            if blocks is not None:  # the last row of a span verifies nothing
                tokens = mx.pad(blocks, [(0, 0), (0, 1)], constant_values=-1).flatten()
            else:
                last = mx.array(in_span == lens[span] - 1)
                tokens = mx.where(last, -1, _draft_of(drafts, owners, in_span))
            draft_spans = DraftSpans(spans, tokens)
        return _SampledRows(spans, owners, (ends - lens)[span] + in_span, draft_spans)


def _newest_ids(
    requests: Requests,
    row_req_indices: np.ndarray,
    positions: np.ndarray,
    last_token_ids: mx.array,
) -> mx.array:
    """`_input_ids` of tokens that are the newest of their requests where the host has not read."""
    beyond = partial(_newest_of, last_token_ids, row_req_indices)
    return _input_ids(requests, row_req_indices, positions, beyond)


def _ragged_ids(
    requests: Requests,
    row_req_indices: np.ndarray,
    positions: np.ndarray,
    last_token_ids: mx.array,
    drafts: StepDrafts | None,
    owner: np.ndarray,
    indices: np.ndarray,
) -> mx.array:
    """`_input_ids` of a batch whose requests may end in drafts.

    owner: [T] int32, request of each token in the step. indices: [T] int32, index of each token
    among its request's drafts; negative: it is none.
    """
    beyond = partial(_newest_of, last_token_ids, row_req_indices)
    if drafts is not None and drafts.counts_np.any():
        beyond = partial(_newest_or_draft, beyond, drafts, owner, indices)
    return _input_ids(requests, row_req_indices, positions, beyond)


def _input_ids(
    requests: Requests,
    row_req_indices: np.ndarray,
    positions: np.ndarray,
    beyond: Callable[[], mx.array],
) -> mx.array:
    """Returns a batch's [T] int32 tokens: the host's copy of each, or the device's if it has none.

    Args:
        requests: hold the tokens that the host has read.
        row_req_indices: [T] req_idx of each token.
        positions: [T] position of each token in its request.
        beyond: computes [T] int32 on the device; used for tokens that the host has not read.
    """
    known = positions < requests.num_known_np[row_req_indices]
    if not (num_known := np.count_nonzero(known)):
        return beyond()
    last = requests.token_ids_np.shape[1] - 1  # a draft may lie past the longest request
    host_ids = mx.array(requests.token_ids_np[row_req_indices, np.minimum(positions, last)])
    if num_known == len(known):
        return host_ids
    return mx.where(mx.array(known), host_ids, beyond())


def following_ids(requests: Requests, rows: Rows, last_token_ids: mx.array) -> mx.array:
    """Returns [T] int32: the next token of its request after each token in the batch.

    Args:
        requests: hold the tokens that the host has read.
        rows: a step without drafts.
        last_token_ids: [max_num_reqs] int32, newest token by req_idx, on the device.
    """
    row_req_indices = np.repeat(rows.req_indices_np, np.diff(rows.query_start_loc_np))
    return _newest_ids(requests, row_req_indices, rows.positions_np + 1, last_token_ids)


def _newest_of(last_token_ids: mx.array, row_req_indices: np.ndarray) -> mx.array:
    """[T] int32: the newest token of the request that each token of the batch belongs to."""
    return last_token_ids[mx.array(row_req_indices)]


def _newest_or_draft(
    newest: Callable[[], mx.array], drafts: StepDrafts, owner: np.ndarray, indices: np.ndarray
) -> mx.array:
    """[T] int32: each request's draft at `indices`; where that is negative, its newest token."""
    drafted = _draft_of(drafts, owner, indices)
    if (indices >= 0).all():
        return drafted
    return mx.where(mx.array(indices >= 0), drafted, newest())


def _draft_of(drafts: StepDrafts, requests: np.ndarray, indices: np.ndarray) -> mx.array:
    """[n] int32: the draft of each request at index `indices`; arbitrary if it has none there."""
    width = drafts.token_ids.shape[1]
    at = requests * width + np.clip(indices, 0, width - 1)
    return drafts.token_ids.reshape(-1)[mx.array(at.astype(np.int32))]
