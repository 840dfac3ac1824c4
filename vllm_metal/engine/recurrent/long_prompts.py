# SPDX-License-Identifier: Apache-2.0
"""Selects prompts that use MLX's chunked recurrence, where it is faster than our kernel.

The kernel computes the rest of the step. `kv_states` reads and writes whole states, so what
convolutions wrote into the blocks in this step is written back with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels import sequences
from metal_kernels.sequences import RecurrenceInputs, Sequences
from vllm_metal.engine.kv_cache.layer_cache import LayerKVCache
from vllm_metal.engine.recurrent.recurrent_state import StateFormat


@dataclass(frozen=True)
class Prompt:
    """Tokens of one request without drafts, at positions that the host knows."""

    first: int  # index of the first token in the step
    read: int  # block of the state; 0: no state yet
    #: Pairs of a number of tokens and the block for the state after them; 0: not stored.
    ends: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LongPrompts:
    """The long prompts of a step, and the sequences left to the kernel."""

    prompts: tuple[Prompt, ...]
    others: Sequences


def chosen(
    step: Sequences, table_np: np.ndarray, blocks_np: np.ndarray, fewest: int
) -> LongPrompts | None:
    """Selects requests with at least `fewest` tokens, no drafts and no kept rows; None if none.

    `table_np` and `blocks_np` must be exact, not upper bounds.
    """
    rows, certain = table_np[:, sequences.NUM_ROWS], table_np[:, sequences.NUM_CERTAIN]
    are_long = (rows >= fewest) & (rows == certain) & (table_np[:, sequences.NUM_KEPT] == 0)
    picked = np.flatnonzero(are_long)
    if not len(picked):
        return None
    prompts = tuple(
        _prompt(table_np[index].tolist(), blocks_np[index], step.block_size)
        for index in picked.tolist()
    )
    # For the kernel the selected prompts have zero tokens, so its table keeps its shape.
    others = mx.array(np.where(are_long[:, None], 0, table_np))
    return LongPrompts(
        prompts,
        Sequences(others, step.blocks, step.tiles, step.block_size, step.num_rows, step.num_kept),
    )


def _prompt(columns: list[int], blocks_np: np.ndarray, size: int) -> Prompt:
    count, position = columns[sequences.NUM_ROWS], columns[sequences.POSITION]
    write = columns[sequences.WRITE]
    ends = {
        end - position: int(blocks_np[end // size - 1])
        for end in range(position + size - position % size, position + count + 1, size)
        if blocks_np[end // size - 1]
    }
    if write:
        ends[count] = write  # a block that ends here is this one, or gets no state
    ends.setdefault(count, 0)
    read = columns[sequences.READ] if position else 0
    return Prompt(columns[sequences.FIRST_ROW], read, tuple(sorted(ends.items())))


def fits(inputs: RecurrenceInputs, state: mx.Dtype, delta: bool) -> bool:
    """Returns whether MLX has a chunked function for this kind of recurrence."""
    by_heads = inputs.decays is not None and inputs.decays.ndim == 2
    return delta and by_heads and state == mx.float32


def recur(
    long: LongPrompts,
    plan: object,
    storage: LayerKVCache,
    form: StateFormat,
    rows: tuple[mx.array, RecurrenceInputs],
    y: mx.array,
) -> mx.array:
    """Computes the prompts' outputs and states; returns [T, HV, DV] outputs of all tokens.

    Args:
        storage: convolutions have already written their parts.
        form: its last part is the recurrence's state.
        rows: queries and inputs of all tokens.
        y: [T, HV, DV] outputs of the other tokens.
    """
    parts, at = [], 0
    for prompt in long.prompts:
        computed, states = _recur_prompt(prompt, plan, storage, form, rows)
        parts += [y[at : prompt.first], *computed]
        at = prompt.first + prompt.ends[-1][0]
        blocks_np = np.array([block for _, block in prompt.ends if block], np.int32)
        if len(blocks_np):
            storage.write_states(blocks_np, form.to_bits(states, storage.dtype.size))
    return mx.concatenate([*parts, y[at:]])


def _recur_prompt(
    prompt: Prompt,
    plan: object,
    storage: LayerKVCache,
    form: StateFormat,
    rows: tuple[mx.array, RecurrenceInputs],
) -> tuple[list[mx.array], list[mx.array]]:
    """Returns outputs, piece by piece, and parts of the states for the prompt's blocks."""
    queries, inputs = rows
    assert inputs.decays is not None
    blocks = [prompt.read, *(block for _, block in prompt.ends if block)]
    width = form.nbytes // storage.dtype.size
    *others, states = form.from_bits(storage.read_states(plan, mx.array(blocks, mx.int32), width))
    (num_heads, value_size), key_size = inputs.values.shape[1:], inputs.keys.shape[-1]
    state = states[:1].reshape(1, num_heads, value_size, key_size)
    if not prompt.read:
        state = mx.zeros_like(state)
    computed, ended, start = [], [], prompt.first
    for count, block in prompt.ends:
        stop = prompt.first + count
        given = (queries, inputs.keys, inputs.values, inputs.decays, inputs.rates)
        query, key, value, decay, rate = (array[None, start:stop] for array in given)
        out, state = mx.fast.gated_delta_update(query, key, value, decay, rate, state)
        computed.append(out[0].astype(inputs.values.dtype))
        if block:
            ended.append(state.reshape(1, *states.shape[1:]))
        start = stop
    after: Sequence[mx.array] = [mx.concatenate(ended)] if ended else []
    return computed, [*(part[1:] for part in others), *after]
