# SPDX-License-Identifier: Apache-2.0
"""Attention of prompts by MLX's fused kernels or plain operations, over what `kv_gather` reads.

plan() decides once a step which rows see which part of a context at once, run() attends once a
layer. A context is gathered once a layer, and past its end are zeros: on an M5 MLX's kernel reads
whole tiles, and 0 times what a stranger left in the pool may be NaN.
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

#: The most bytes of K and V that a command buffer gathers; K/V heads have theirs in turns, and one
#: is gathered whole. 32k tokens of 8 heads of 128 elements of 16 bits are so much.
GATHERED_AT_ONCE = 2**27


@dataclass(frozen=True)
class Piece:
    """Rows of a prompt that attend in one call, to some of its context."""

    first: int  # of the prompt's rows in this step
    num_rows: int
    begin: int  # the first slot of the gathered context that any of them sees
    end: int  # behind the last one's own
    mask: mx.array | None  # [num_rows, end - begin] bool; None: each row sees all before it


@dataclass(frozen=True)
class Prompt:
    """The last rows of one request's context."""

    num_rows: int
    block_table: mx.array  # [1, W] int32, from the first block that a row sees
    bounds: mx.array  # [1, 2] int32, slots of these blocks that are the request's and seen
    pieces: tuple[Piece, ...]

    @property
    def num_seen(self) -> int:
        """Keys that calls go through, summed over rows."""
        return sum(piece.num_rows * (piece.end - piece.begin) for piece in self.pieces)


@dataclass(frozen=True)
class PromptPlan:
    """How prompts of a step attend, for all layers that share a block table, shape and window."""

    shape: AttentionShape
    block_size: int
    prompts: tuple[Prompt, ...]  # in the order of their rows
    force_fused: bool  # else MLX may take plain operations, for which rows are few at once

    @property
    def num_tokens(self) -> int:
        return sum(prompt.num_rows for prompt in self.prompts)

    @property
    def work(self) -> int:
        """FLOPs of a layer."""
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
    """Cuts R requests' rows into calls.

    Args:
        query_start_loc: [R + 1] int32, first row of each request among these.
        seq_lens: [R] int32, context of each request including these rows.
        block_tables: [R, W] int32, pool blocks of each request in order.
        block_size: tokens of a block.
        shape: of the layers' attention.
        window: a query at position p sees positions (p - window, p]; None sees [0, p]. No call has
            more rows than that.
        force_fused: whether MLX must take a fused kernel; None: on a GPU, a CPU has none. Where it
            need not, no call has more than MAX_SCORES scores a head, unless a row has.
        most_work: FLOPs of a call, where it has more than MIN_ROWS rows.
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
        seen = min(length, 2 * (window or length))  # keys of a call, at most
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
    """Attention of one layer; arguments and results are those of `paged_attention.run`.

    The reads' fences come as one.

    Args:
        plan: of the prompts, whose rows `queries` has.

    Raises:
        ValueError: MLX has no fused kernel, where the plan forces one.
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
                after = mx.depends(after, before[0])  # whose contexts are gone then
                if pace is not None:
                    pace.end(*before)
            keys, values, reads = layer.gather(prompt, heads, queries.dtype, after)
            fences += reads
            parts.append(layer.attend(prompt, rows, keys, values, sinks, heads, pace, before))
        outputs.append(_joined(parts, 1)[0].swapaxes(0, 1))
        first += prompt.num_rows
    return _joined(outputs, 0), [merged(fences)]


def turns(num_heads: int, of_head: int) -> Iterator[tuple[int, int]]:
    """The first of so many K/V heads, and their number, for each turn; `of_head`: bytes of one."""
    count = min(max(GATHERED_AT_ONCE // of_head, 1), num_heads)
    for first in range(0, num_heads, count):
        yield first, min(count, num_heads - first)


def head_bytes(shape: AttentionShape, num_slots: int, dtype: mx.Dtype) -> int:
    """Bytes of what is gathered of one K/V head, and of values that may be padded to keys' size."""
    if shape.latent:
        return num_slots * shape.head_size * dtype.size
    padded = 0 if shape.value_size == shape.head_size else shape.head_size
    return num_slots * (shape.head_size + shape.value_size + padded) * dtype.size


def waiting_bytes(shape: AttentionShape, num_slots: int, num_prompts: int, dtype: mx.Dtype) -> int:
    """Bytes of K and V that wait for the device beside one prompt's, in steps that are paced.

    Each layer ends a command buffer, and as many as Pace lets wait have gathered theirs.

    Args:
        shape: of the layers' attention.
        num_slots: of the longest context.
        num_prompts: of a step.
        dtype: of the rows.
    """
    of_head = head_bytes(shape, num_slots, dtype)
    (_, count), *_ = turns(shape.num_kv_heads, of_head)
    of_one = count * of_head
    of_buffer = max(of_one, min(num_prompts * shape.num_kv_heads * of_head, GATHERED_AT_ONCE))
    return (IN_FLIGHT + 1) * of_buffer - of_one


@dataclass(frozen=True)
class _Layer:
    """What the calls of a layer have in common."""

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
        """[1, h, S, D] and [1, h, S, DV] of these heads, of the padded size, and the fences."""
        keys, read_keys = kv_gather.gather(
            self.key_pool,
            *(prompt.block_table, dtype, [after], self.key_scales, prompt.bounds, heads),
        )
        if self.plan.shape.latent:  # whose first elements are the values
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
        """[1, h * group, Q, DV] of [1, H, Q, D] rows; `before`: what was queued before, if any."""
        shape, force_fused = self.plan.shape, self.plan.force_fused
        here = slice(heads[0] * shape.group, sum(heads) * shape.group)
        share = heads[1] / shape.num_kv_heads
        outputs: list[mx.array] = []
        for piece in prompt.pieces:
            some = rows[:, here, piece.first : piece.first + piece.num_rows]
            if pace is not None:
                seen = piece.num_rows * (piece.end - piece.begin)
                pace.before(int(seen * _work_of(shape) * share), *(outputs[-1:] or before))
            if outputs and not force_fused:  # whose scores are gone then
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
        return _joined(outputs, 2)


def _piece(
    before: int,
    first: int,
    num_rows: int,
    base: int,
    window: int | None,
    masks: dict[tuple[int, int, int], mx.array],
) -> Piece:
    """Rows from `first` on, of positions from `before` + `first` on.

    Args beyond plan's:
        base: position of the gathered context's first slot.
        masks: those made so far; layers far behind a window's beginning share one.
    """
    start = before + first
    end = start + num_rows
    begin = base if window is None else max(start - window + 1, 0)
    mask = None
    if window is not None and end - window > begin:  # the last row does not see the first key
        key = (num_rows, start - begin, window)
        if key not in masks:
            rows = mx.arange(start - begin, end - begin)[:, None]
            slots = mx.arange(end - begin)
            masks[key] = (slots <= rows) & (slots > rows - window)
        mask = masks[key]
    return Piece(first, num_rows, begin - base, end - base, mask)


def _work_of(shape: AttentionShape) -> int:
    """FLOPs of a row and a key, of all heads."""
    return 2 * shape.num_heads * (shape.head_size + shape.value_size)


def _joined(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis)
