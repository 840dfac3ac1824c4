# SPDX-License-Identifier: Apache-2.0
"""Recurrences over sequences in MLX's operations, once per layer, by a ReferencePlan."""

from dataclasses import replace

import mlx.core as mx

from metal_kernels.recurrence.chunks import (
    ChunkStates,
    Rows,
    RowStates,
    through_chunk,
    through_rows,
)
from metal_kernels.sequence_groups import Group, ReferencePlan
from metal_kernels.sequences import RecurrenceInputs


def run(
    plan: ReferencePlan,
    queries: mx.array,
    inputs: RecurrenceInputs,
    kept: RecurrenceInputs | None,
    states: mx.array,
    delta: bool,
    log_rates: mx.array | None = None,
) -> tuple[mx.array, mx.array, RecurrenceInputs]:
    """Computes a recurrence through all sequences of a step, in float32.

    Args:
        plan: plan of the step.
        queries: [T, HK, DK], with any scale already applied.
        inputs: T rows.
        kept: P' rows kept by the previous step; None: none.
        states: [N, HV, DV, DK], before the kept rows.
        delta: use the delta rule.
        log_rates: A, [HV, DK] float32, required if the inputs have no decays.

    Returns:
        [T, HV, DV] outputs in the values' dtype, [E, HV, DV, DK] states in their dtype, and
        num_kept inputs of drafts.

    Raises:
        ValueError: kept rows or decays are required but missing.
    """
    if plan.uses_kept and kept is None:
        raise ValueError("the plan applies kept rows, but none are given")
    if inputs.decays is None and log_rates is None:
        raise ValueError("a recurrence without decays needs log_rates")
    num_heads, num_key_heads = states.shape[1], queries.shape[1]
    if log_rates is not None:
        log_rates = log_rates.reshape(num_key_heads, num_heads // num_key_heads, 1, -1)
    sources = _sources(plan, queries, inputs, kept)
    outputs, ended = [], []
    for group in plan.groups:
        rows = _rows(group, sources)
        if rows.decays is None and delta:
            assert log_rates is not None
            rows = replace(rows, decays=mx.exp(rows.rates * log_rates))
        state = _states(group, states).reshape(-1, *rows.values.shape[1:3], *states.shape[2:])
        output, ends = _run_group(group, rows, state, delta, log_rates)
        outputs.append(output)
        ended += ends
    return (
        _outputs(plan, outputs, inputs.values),
        _merge_states(ended, states),
        _drafts(plan, inputs),
    )


def _run_group(
    group: Group, rows: Rows, state: mx.array, delta: bool, log_rates: mx.array | None
) -> tuple[mx.array, list[mx.array]]:
    """Returns a group's [n, HK, G, Q, DV] outputs, and the states to store after each chunk."""
    outputs, ended = [], []
    for chunk in group.chunks:
        part = rows.part(chunk.start, chunk.stop)
        found: ChunkStates | RowStates
        if part.decays is None:
            assert log_rates is not None
            output, found = through_rows(part, state, log_rates)
        else:
            output, found = through_chunk(part, state, delta)
        outputs.append(output)
        if chunk.endings is not None:
            ended.append(found.after(chunk.endings))
        if chunk is not group.chunks[-1]:
            state = found.after(None)
    return _concatenate(outputs, -2), ended


def _concatenate(parts: list[mx.array], axis: int) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def _merge_states(ended: list[mx.array], states: mx.array) -> mx.array:
    """Merges chunks' [E', HK, G, DV, DK] to [E, HV, DV, DK] in the states' dtype."""
    if not ended:
        return states[:0]
    return _concatenate(ended, 0).reshape(-1, *states.shape[1:]).astype(states.dtype)


def _sources(
    plan: ReferencePlan, queries: mx.array, inputs: RecurrenceInputs, kept: RecurrenceInputs | None
) -> tuple[mx.array, RecurrenceInputs]:
    """Returns the arrays that `Group.rows` index."""
    if plan.num_rows == 0:
        queries = mx.zeros((1, *queries.shape[1:]), queries.dtype)  # a row to index
    if not plan.uses_kept:
        return queries, inputs
    assert kept is not None

    def both(ours: mx.array, theirs: mx.array) -> mx.array:
        return mx.concatenate([ours, theirs.astype(ours.dtype)])

    decays = None
    if inputs.decays is not None:
        assert kept.decays is not None
        decays = both(inputs.decays, kept.decays)
    keys, values = both(inputs.keys, kept.keys), both(inputs.values, kept.values)
    return queries, RecurrenceInputs(keys, values, both(inputs.rates, kept.rates), decays)


def _rows(group: Group, sources: tuple[mx.array, RecurrenceInputs]) -> Rows:
    queries, inputs = sources
    num_key_heads, num_heads = inputs.keys.shape[1], inputs.values.shape[1]
    per_head = (num_key_heads, num_heads // num_key_heads)

    def padded(source: mx.array, rows: mx.array | None, *last: int) -> mx.array:
        """Gathers rows of `source` for the group, [n, HK, 1 or G, L or Q, *]."""
        taken = source if rows is None else mx.take(source, rows, axis=0)
        of_groups = taken.astype(mx.float32).reshape(group.size, -1, *last)
        return of_groups.transpose(0, 2, 3, 1, 4)

    def live(array: mx.array, otherwise: int) -> mx.array:
        if group.live is None:
            return array
        return mx.where(group.live[:, None, None, :, None], array, otherwise)

    decays = inputs.decays
    if decays is not None:
        width = 1 if decays.ndim == 2 else decays.shape[-1]
        decays = live(padded(decays, group.rows, *per_head, width), 1)
    return Rows(
        padded(queries, group.outputs, num_key_heads, 1, queries.shape[-1]),
        padded(inputs.keys, group.rows, num_key_heads, 1, queries.shape[-1]),
        padded(inputs.values, group.rows, *per_head, inputs.values.shape[-1]),
        live(padded(inputs.rates, group.rows, *per_head, 1), 0),
        decays,
    )


def _states(group: Group, states: mx.array) -> mx.array:
    """Returns [n, HV, DV, DK] float32 states before the group's rows."""
    if group.sequences is not None:
        states = mx.take(states, group.sequences, axis=0)
    if group.fresh is not None:
        states = mx.where(group.fresh[:, None, None, None], 0, states)
    return states.astype(mx.float32)


def _outputs(plan: ReferencePlan, outputs: list[mx.array], values: mx.array) -> mx.array:
    """Merges the groups' [n, HK, G, Q, DV] to [T, HV, DV]."""
    if plan.num_rows == 0:
        return values
    padded = [output.transpose(0, 3, 1, 2, 4).reshape(-1, *values.shape[1:]) for output in outputs]
    rows = _concatenate(padded, 0)
    if plan.order is not None:
        rows = mx.take(rows, plan.order, axis=0)
    return rows.astype(values.dtype)


def _drafts(plan: ReferencePlan, inputs: RecurrenceInputs) -> RecurrenceInputs:

    def taken(array: mx.array) -> mx.array:
        if plan.num_rows == 0:
            return mx.zeros((plan.num_kept, *array.shape[1:]), array.dtype)
        return mx.take(array, plan.keep, axis=0)

    decays = None if inputs.decays is None else taken(inputs.decays)
    return RecurrenceInputs(taken(inputs.keys), taken(inputs.values), taken(inputs.rates), decays)
