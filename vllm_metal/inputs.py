# SPDX-License-Identifier: Apache-2.0
"""One step's inputs: built once from the persistent tables, never changed."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from vllm_metal.kv_cache.region import StepLayout
from vllm_metal.requests import Requests, RequestState


@dataclass(frozen=True)
class PromptRows:
    """Rows of one request whose logits are wanted as prompt logprobs."""

    state: RequestState
    start: int  # first of them among the selected logits
    target_ids_np: np.ndarray  # [n] int32, the token that follows each row in the prompt
    last: bool  # no later chunk has more


@dataclass(frozen=True)
class InputBatch:
    """A ragged batch of R requests and T rows; request r owns rows query_start_loc[r : r + 2]."""

    states: list[RequestState]  # [R]
    slots_np: np.ndarray  # [R] int32
    query_start_loc_np: np.ndarray  # [R + 1] int32
    seq_lens_np: np.ndarray  # [R] int32, context including this step's rows
    positions_np: np.ndarray  # [T] int32
    positions: mx.array  # [T] int32
    input_ids: mx.array  # [T] int32, on the device
    sampling_np: np.ndarray  # [N] int32, requests (indices into [R]) that sample a token
    num_output_tokens_np: np.ndarray  # [N] int32, tokens each of those has generated before
    prompt_rows: tuple[PromptRows, ...]
    logits_indices: mx.array | None  # [N + prompt rows] int32, rows to compute logits of; None: all


def prepare(
    requests: Requests, num_scheduled_tokens: dict[str, int], last_token_ids: mx.array
) -> InputBatch:
    """Lays the scheduled requests out as one ragged batch.

    Args:
        requests: brought up to date with this step's scheduler output.
        num_scheduled_tokens: request id to its number of rows in this step.
        last_token_ids: [max_num_reqs] int32, by slot the token last sampled, on the device. A row
            whose token the host does not know yet takes it from there.
    """
    states = [requests[req_id] for req_id in num_scheduled_tokens]
    slots = np.fromiter((state.slot for state in states), np.int32, len(states))
    scheduled = np.fromiter(num_scheduled_tokens.values(), np.int32, len(states))
    computed = requests.num_computed_tokens_np[slots]
    seq_lens = computed + scheduled
    query_start_loc = np.zeros(len(states) + 1, np.int32)
    np.cumsum(scheduled, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])

    row_slots = np.repeat(slots, scheduled)
    offsets = np.arange(num_tokens, dtype=np.int32) - np.repeat(query_start_loc[:-1], scheduled)
    positions = np.repeat(computed, scheduled) + offsets
    host_ids = mx.array(requests.token_ids_np[row_slots, positions])
    unknown = positions >= requests.num_known_np[row_slots]
    input_ids = host_ids
    if unknown.any():
        input_ids = mx.where(mx.array(unknown), last_token_ids[mx.array(row_slots)], host_ids)

    sampling = np.flatnonzero(seq_lens == requests.num_tokens_np[slots]).astype(np.int32)
    sampling_slots = slots[sampling]
    num_outputs = (
        requests.num_tokens_np[sampling_slots] - requests.num_prompt_tokens_np[sampling_slots]
    )
    sample_rows = query_start_loc[sampling + 1] - 1
    prompt_rows, extra = _prompt_rows(requests, states, computed, query_start_loc, len(sample_rows))
    rows = np.concatenate([sample_rows, *extra])
    everything = len(rows) == num_tokens and bool((rows == np.arange(num_tokens)).all())
    return InputBatch(
        states=states,
        slots_np=slots,
        query_start_loc_np=query_start_loc,
        seq_lens_np=seq_lens,
        positions_np=positions,
        positions=mx.array(positions),
        input_ids=input_ids,
        sampling_np=sampling,
        num_output_tokens_np=num_outputs,
        prompt_rows=prompt_rows,
        logits_indices=None if everything else mx.array(rows.astype(np.int32)),
    )


def _prompt_rows(
    requests: Requests,
    states: list[RequestState],
    computed: np.ndarray,
    query_start_loc: np.ndarray,
    base: int,
) -> tuple[tuple[PromptRows, ...], list[np.ndarray]]:
    """Prompt rows that predict another prompt token, for requests whose prompt logprobs are due."""
    found, rows = [], []
    for index, state in enumerate(states):
        if state.prompt_logprobs is None:
            continue
        first, start = int(computed[index]), int(query_start_loc[index])
        num_rows = int(query_start_loc[index + 1]) - start
        predicting = min(num_rows, state.num_prompt_tokens - 1 - first)
        if predicting <= 0:
            continue
        targets = requests.token_ids_np[state.slot, first + 1 : first + 1 + predicting].copy()
        last = first + predicting == state.num_prompt_tokens - 1
        found.append(PromptRows(state, base, targets, last))
        rows.append(np.arange(start, start + predicting, dtype=np.int32))
        base += predicting
    return tuple(found), rows


def step_layout(batch: InputBatch, block_table_np: np.ndarray, block_size: int) -> StepLayout:
    """Where the batch lies in one KV cache group's blocks.

    Args:
        batch: the step.
        block_table_np: [max_num_reqs, max_blocks] int32, the group's table by slot.
        block_size: tokens of a block.
    """
    # Narrowed to the longest context, so that a step's cost follows what it really holds.
    width = -(-int(batch.seq_lens_np.max()) // block_size)
    tables = block_table_np[batch.slots_np, :width]
    requests = np.repeat(np.arange(len(batch.states)), np.diff(batch.query_start_loc_np))
    blocks = tables[requests, batch.positions_np // block_size]
    return StepLayout(
        query_start_loc_np=batch.query_start_loc_np,
        seq_lens_np=batch.seq_lens_np,
        block_tables_np=tables,
        slot_mapping_np=blocks * block_size + batch.positions_np % block_size,
        block_size=block_size,
    )
