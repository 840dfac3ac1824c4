# SPDX-License-Identifier: Apache-2.0
"""Plans tokens that attend to chosen positions of their contexts only.

DeepSeek-V3.2 (arXiv:2512.02556) attends to at most `index_topk` positions per token, those with the
highest scores of an indexer; MiniMax M3 to some blocks of positions. A token whose context has no
more positions attends to all of them, by its own context: a step, and a prompt, may have tokens of
both kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, cast

import mlx.core as mx
import numpy as np

from metal_kernels.pace import Pace, pace_of
from metal_kernels.paged_attention.buckets import Bucket, BucketPlan
from vllm_metal.engine.kv_cache.layer_state import PlanT, StepLayout, joined
from vllm_metal.engine.kv_cache.separate_prompts import without

#: Position or slot of nothing. A lower slot is a row that this step writes; see `read_slots_of`.
ABSENT = -1


@dataclass(frozen=True)
class SparseTokens:
    """The t of a step's T tokens that attend to chosen positions, and the order of all."""

    num_tokens: int  # t
    rows: mx.array | None  # [t] int32, indices of these tokens in the step; None: all, in order
    others: mx.array | None  # [T - t] int32, indices of all other tokens; None: there are none
    order: mx.array | None  # [T] int32, index of each token in others + rows; None: identity
    contexts: BucketPlan  # to choose from, or to attend to; tokens are those of `rows`
    block_size: int  # of `contexts`
    pace: Pace | None  # where the step's command buffers end; None: where MLX ends them

    def of_all(self, values: mx.array) -> mx.array:
        """Selects these tokens' rows of [T, ...] values."""
        return values if self.rows is None else values[self.rows]

    def in_order(self, parts: Sequence[mx.array]) -> mx.array:
        """Joins results of the other tokens, if any, and of these, in the order of the step."""
        found = joined(parts)
        return found if self.order is None else found[self.order]

    def read_slots_of(self, chosen: mx.array) -> mx.array:
        """Maps chosen positions to slots in the pool of the layers that this plan is of.

        Layers that attend may have other block tables than the one that chose.

        Args:
            chosen: [t, C, topk] int32, or ABSENT.

        Returns:
            [t, C, topk] int32 slots, see `read_slots_of`; ABSENT as in `chosen`.
        """
        found = []
        for bucket, read_slots in zip(self.contexts.buckets, self._read_slots, strict=True):
            rows = chosen if bucket.rows is None else chosen[bucket.rows]
            flat = mx.maximum(rows, 0).reshape(bucket.num_requests, -1)
            slots = mx.take_along_axis(read_slots, flat, axis=1).reshape(rows.shape)
            found.append(mx.where(rows == ABSENT, ABSENT, slots))
        of_chosen, order = joined(found), self.contexts.order
        return of_chosen if order is None else of_chosen[order]

    @cached_property
    def _read_slots(self) -> tuple[mx.array, ...]:
        """For each bucket of `contexts` [n, S] int32, the slot of each position.

        Cached, so that all layers share them.
        """
        return tuple(read_slots_of(bucket, self.block_size) for bucket in self.contexts.buckets)


class SparsePlan(Protocol):
    """An attention plan that leaves out tokens that attend to chosen positions only."""

    @property
    def sparse(self) -> SparseTokens | None:
        """The tokens left out; None: there are none."""


def read_slots_of(bucket: Bucket, block_size: int) -> mx.array:
    """Returns [n, S] int32: the slot to read for each position of the bucket's contexts.

    A position whose K/V this step writes, but the pool does not hold yet, has -2 - i for row i of
    the rows that are written.
    """
    first = bucket.block_table[:, :, None] * block_size
    read_slots = (first + mx.arange(block_size, dtype=mx.int32)).reshape(bucket.num_requests, -1)
    if not bucket.fresh.size:
        return read_slots
    rows = bucket.sources
    if rows is None:
        rows = mx.arange(bucket.fresh.size, dtype=mx.int32)
    flat = read_slots.flatten()
    flat[bucket.fresh] = ABSENT - 1 - rows
    return flat.reshape(read_slots.shape)


def planned(
    layout: StepLayout,
    topk: int,
    plan_of: Callable[[StepLayout], Any],
    contexts_of: Callable[[StepLayout], BucketPlan],
    work: int,
) -> Any:
    """Returns a step's plan for layers that attend to `topk` positions, with `sparse` set.

    Args:
        plan_of: plans a layout of the tokens that attend to their whole contexts. The plan must
            write all of the step's tokens.
        contexts_of: groups the requests of a layout.
        work: FLOPs of a layer per token with `topk` positions.
    """
    cut, sparse = _split(layout, topk)
    if not sparse.any():
        return plan_of(layout)
    plan, found = plan_of(without(cut, sparse)), _tokens(cut, sparse, contexts_of)
    return _paced(plan, found, layout, found.num_tokens * work, plan.pace)


def with_contexts(
    layout: StepLayout,
    topk: int,
    plan_of: Callable[[StepLayout], Any],
    contexts_of: Callable[[StepLayout], BucketPlan],
    work: int,
) -> Any:
    """Returns a step's plan for layers of index keys, with `sparse` set.

    Args:
        plan_of: plans the write of all of a layout's tokens.
        contexts_of: groups the requests of a layout.
        work: FLOPs of a layer per token and position.
    """
    plan, (cut, sparse) = plan_of(layout), _split(layout, topk)
    if not sparse.any():
        return plan
    rows = np.diff(cut.query_start_loc_np)[sparse]
    all_work = int((rows * cut.seq_lens_np[sparse]).sum()) * work
    return _paced(plan, _tokens(cut, sparse, contexts_of), layout, all_work)


def _paced(
    plan: PlanT, sparse: SparseTokens, layout: StepLayout, work: int, pace: Pace | None = None
) -> PlanT:
    """Returns the plan with `sparse`, both with the given pace, or one by a layer's FLOPs."""
    known = cast(Any, plan)
    if layout.pace is None:
        return cast(PlanT, replace(known, sparse=sparse))
    pace = pace or pace_of(layout.pace, int(layout.query_start_loc_np[-1]), work)
    return cast(PlanT, replace(known, sparse=replace(sparse, pace=pace), pace=pace))


def _split(layout: StepLayout, topk: int) -> tuple[StepLayout, np.ndarray]:
    """Splits requests before the first token with more than `topk` positions.

    Returns the layout of R' parts, and [R'] bool, those with such tokens. Lengths may be upper
    bounds: tokens that then have fewer positions choose all of them.
    """
    starts = layout.query_start_loc_np
    num_rows = np.diff(starts)
    whole = np.clip(topk - (layout.seq_lens_np - num_rows), 0, num_rows)
    cut = layout.cut_at(starts[:-1] + whole)
    return cut, cut.seq_lens_np > topk


def _tokens(
    cut: StepLayout, sparse: np.ndarray, contexts_of: Callable[[StepLayout], BucketPlan]
) -> SparseTokens:
    assert cut.earlier_slots_np is None  # of draft networks, which have no such layers
    ours, others = cut.rows_of(sparse), cut.rows_of(~sparse)
    order = np.argsort(np.concatenate([others, ours])).astype(np.int32)
    in_order = bool((order == np.arange(len(order))).all())
    return SparseTokens(
        len(ours),
        mx.array(ours) if len(others) else None,
        mx.array(others) if len(others) else None,
        None if in_order else mx.array(order),
        contexts_of(without(cut, ~sparse)),
        cut.block_size,
        None,
    )
