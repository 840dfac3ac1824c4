# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts by MLX's kernels or plain operations, over contexts from `kv_gather`.

plan() divides the rows of a step into calls, and run() attends for each layer. Each layer gathers a
context once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels import kv_gather
from metal_kernels.op_common import merged
from metal_kernels.pace import IN_FLIGHT, MOST_WORK, Pace
from metal_kernels.paged_attention import plain
from metal_kernels.paged_attention.buckets import MAX_SCORES, MIN_ROWS
from metal_kernels.paged_attention.fused import FEW_ROWS, even_cuts, fused_value_size, is_plain
from metal_kernels.paged_attention.plan import AttentionShape

# Gathered contexts are zero behind their end: on an M5, MLX's kernel reads whole tiles, and 0 times
# what another request left in the pool may be NaN.

#: Most bytes of K and V that a command buffer gathers, in turns of K/V heads, at least one head.
#: 32k tokens of 8 heads of 128 16-bit elements take this much.
GATHERED_AT_ONCE = 2**27


@dataclass(frozen=True)
class Piece:
    """Rows of a prompt that attend in one call to part of its context."""

    first: int  # index among the prompt's rows in this step
    num_rows: int
    begin: int  # first slot of the gathered context that a row sees
    end: int  # one past the last row's own slot
    mask: mx.array | None  # [num_rows, end - begin] bool; None: causal


@dataclass(frozen=True)
class Prompt:
    """One request's rows of this step, which are the last of its context."""

    num_rows: int
    block_table: mx.array  # [1, W] int32, from the first block that a row sees
    bounds: mx.array  # [1, 2] int32, visible slots of the request in these blocks
    pieces: tuple[Piece, ...]

    @property
    def num_seen(self) -> int:
        """Number of (row, key) pairs that calls compute."""
        return sum(piece.num_rows * (piece.end - piece.begin) for piece in self.pieces)


@dataclass(frozen=True)
class PromptPlan:
    """Attention of a step's prompts, for all layers that share a block table, shape and window."""

    shape: AttentionShape
    block_size: int
    prompts: tuple[Prompt, ...]  # in row order
    force_fused: bool  # otherwise MLX may choose plain operations, so calls have few rows

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_rows for prompt in self.prompts)

    @property
    def work(self) -> int:
        """FLOPs per layer."""
        return sum(prompt.num_seen for prompt in self.prompts) * _work_of(self.shape)


def plan(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    shape: AttentionShape,
    window: int | None = None,
    force_fused: bool | None = None,
    most_work: int = MOST_WORK,
) -> PromptPlan:
    """Divides R requests' rows into calls.

    Args:
        query_start_loc, seq_lens, block_tables, block_size: see `plan.plan`, for prompts only.
        window: see `plan.plan`; also limits the rows of a call.
        force_fused: require a fused kernel of MLX; None: only on a GPU, as the CPU has none.
            Otherwise calls have at most MAX_SCORES scores per head, unless a single row has more.
        most_work: limit of FLOPs of calls with more than MIN_ROWS rows.
    """
    if force_fused is None:
        force_fused = mx.default_device().type == mx.DeviceType.gpu
    masks: dict[tuple[int, int, int], mx.array] = {}
    prompts = []
    for index, length in enumerate(seq_lens.tolist()):
        num_rows = int(query_start_loc[index + 1] - query_start_loc[index])
        before = length - num_rows
        begin = 0 if window is None else max(before - window + 1, 0)
        base = begin // block_size
        seen = min(length, 2 * (window or length))  # most keys of a call
        if force_fused:
            most = max(most_work // (seen * _work_of(shape)), MIN_ROWS)
        else:
            most = max(MAX_SCORES // seen, 1)
        most = min(most, window or num_rows)
        pieces = tuple(
            _piece(before, first, count, base * block_size, window, masks)
            for first, count in even_cuts(num_rows, most)
        )
        table = block_tables[index : index + 1, base : -(-length // block_size)]
        bounds = np.array([[begin, length]], np.int32) - np.int32(base * block_size)
        prompts.append(Prompt(num_rows, mx.array(table.astype(np.int32)), mx.array(bounds), pieces))
    return PromptPlan(shape, block_size, tuple(prompts), force_fused)


def run(
    plan: PromptPlan,
    queries: mx.array,
    key_pool: mx.array,
    value_pool: mx.array,
    after: mx.array,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    key_scales: mx.array | None = None,
    value_scales: mx.array | None = None,
    pace: Pace | None = None,
) -> tuple[mx.array, list[mx.array]]:
    """Attends for one layer; see `paged_attention.run`. Returns one merged fence for all reads.

    Raises ValueError: the plan requires a fused kernel that MLX does not have.
    """
    layer = _Layer(plan, scale, softcap, key_pool, value_pool, key_scales, value_scales)
    outputs: list[mx.array] = []
    fences: list[mx.array] = []
    first, gathered = 0, 0
    for prompt in plan.prompts:
        rows = queries[first : first + prompt.num_rows].swapaxes(0, 1)[None]
        slots = prompt.block_table.shape[1] * plan.block_size
        of_head = head_bytes(plan.shape, slots, queries.dtype)
        parts: list[mx.array] = []
        for heads in turns(plan.shape.num_kv_heads, of_head):
            before = (parts or outputs)[-1:]
            gathered += heads[1] * of_head
            if gathered > GATHERED_AT_ONCE and before:
                gathered = heads[1] * of_head
                after = mx.depends(after, before[0])  # frees the contexts of these outputs first
                if pace is not None:
                    pace.end(*before)
            keys, values, reads = layer.gather(prompt, heads, queries.dtype, after)
            fences += reads
            parts.append(layer.attend(prompt, rows, keys, values, sinks, heads, pace, before))
        outputs.append(_concatenate(parts, 1)[0].swapaxes(0, 1))
        first += prompt.num_rows
    return _concatenate(outputs, 0), [merged(fences)]


def turns(num_heads: int, of_head: int) -> Iterator[tuple[int, int]]:
    """Yields the first and the number of K/V heads to gather at a time; `of_head`: bytes of one."""
    count = min(max(GATHERED_AT_ONCE // of_head, 1), num_heads)
    for first in range(0, num_heads, count):
        yield first, min(count, num_heads - first)


def head_bytes(shape: AttentionShape, num_slots: int, dtype: mx.Dtype) -> int:
    """Returns the bytes of one gathered K/V head, including values padded to the keys' size."""
    if shape.latent:
        return num_slots * shape.head_size * dtype.size
    padded = 0 if shape.value_size == shape.head_size else shape.head_size
    return num_slots * (shape.head_size + shape.value_size + padded) * dtype.size


def waiting_bytes(shape: AttentionShape, num_slots: int, num_prompts: int, dtype: mx.Dtype) -> int:
    """Returns the bytes of gathered K and V that a paced step holds beyond those of one prompt.

    `num_slots`: slots of the longest context.
    """
    # Each layer ends a command buffer, and Pace lets IN_FLIGHT of them wait with gathered contexts.
    of_head = head_bytes(shape, num_slots, dtype)
    (_, count), *_ = turns(shape.num_kv_heads, of_head)
    of_one = count * of_head
    of_buffer = max(of_one, min(num_prompts * shape.num_kv_heads * of_head, GATHERED_AT_ONCE))
    return (IN_FLIGHT + 1) * of_buffer - of_one


@dataclass(frozen=True)
class _Layer:
    """The arguments that all calls of a layer share."""

    plan: PromptPlan
    scale: float
    softcap: float | None
    key_pool: mx.array
    value_pool: mx.array
    key_scales: mx.array | None
    value_scales: mx.array | None

    def gather(
        self, prompt: Prompt, heads: tuple[int, int], dtype: mx.Dtype, after: mx.array
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        """Returns [1, h, S, D] keys and [1, h, S, DV] padded values of heads, and the fences."""
        keys, read_keys = kv_gather.gather(
            self.key_pool,
            *(prompt.block_table, dtype, [after], self.key_scales, prompt.bounds, heads),
        )
        if self.plan.shape.latent:  # the values are the first elements of the keys
            keys = keys.swapaxes(0, 1)
            return keys, keys[..., : self.plan.shape.value_size], [read_keys]
        values, read_values = kv_gather.gather(
            self.value_pool,
            *(prompt.block_table, dtype, [after], self.value_scales, prompt.bounds, heads),
        )
        sizes = keys.shape[-1], values.shape[-1]
        if self.plan.force_fused and (padded := fused_value_size(*sizes, dtype)) is not None:
            missing = padded - sizes[1]
            values = mx.pad(values, [(0, 0)] * 3 + [(0, missing)]) if missing else values
        return keys.swapaxes(0, 1), values.swapaxes(0, 1), [read_keys, read_values]

    def attend(
        self,
        prompt: Prompt,
        rows: mx.array,
        keys: mx.array,
        values: mx.array,
        sinks: mx.array | None,
        heads: tuple[int, int],
        pace: Pace | None,
        before: list[mx.array],
    ) -> mx.array:
        """Returns [1, h * group, Q, DV] of [1, H, Q, D] rows; `before`: outputs queued so far."""
        shape, force_fused = self.plan.shape, self.plan.force_fused
        here = slice(heads[0] * shape.group, sum(heads) * shape.group)
        share = heads[1] / shape.num_kv_heads
        outputs: list[mx.array] = []
        for piece in prompt.pieces:
            some = rows[:, here, piece.first : piece.first + piece.num_rows]
            if pace is not None:
                seen = piece.num_rows * (piece.end - piece.begin)
                pace.before(int(seen * _work_of(shape) * share), *(outputs[-1:] or before))
            if outputs and not force_fused:  # frees the previous call's scores first
                some = mx.depends(some, outputs[-1])
            there = slice(piece.begin, piece.end)
            read = some, keys[:, :, there], values[:, :, there]
            own_sinks = None if sinks is None else sinks[here]
            if is_plain(shape, rows.dtype, self.softcap):
                out = plain.attend(*read, self.scale, piece.mask, own_sinks, self.softcap)
            else:
                out = mx.fast.scaled_dot_product_attention(
                    *read,
                    scale=self.scale,
                    mask="causal" if piece.mask is None else piece.mask,
                    sinks=own_sinks,
                    force_fused=force_fused and piece.num_rows > FEW_ROWS,
                )
            outputs.append(out[..., : shape.value_size])
        return _concatenate(outputs, 2)


def _piece(
    before: int,
    first: int,
    num_rows: int,
    base: int,
    window: int | None,
    masks: dict[tuple[int, int, int], mx.array],
) -> Piece:
    """Returns the piece of `num_rows` rows from index `first`, at position `before` + `first`.

    `base`: position of the gathered context's first slot. `masks`: cache of masks; pieces with a
    full window share one.
    """
    start = before + first
    end = start + num_rows
    begin = base if window is None else max(start - window + 1, 0)
    mask = None
    if window is not None and end - window > begin:  # else the last row sees the first key, too
        key = (num_rows, start - begin, window)
        if key not in masks:
            rows = mx.arange(start - begin, end - begin)[:, None]
            slots = mx.arange(end - begin)
            masks[key] = (slots <= rows) & (slots > rows - window)
        mask = masks[key]
    return Piece(first, num_rows, begin - base, end - base, mask)


def _work_of(shape: AttentionShape) -> int:
    """Returns the FLOPs per row and key, for all heads."""
    return 2 * shape.num_heads * (shape.head_size + shape.value_size)


def _concatenate(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis)
