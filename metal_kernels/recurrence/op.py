# SPDX-License-Identifier: Apache-2.0
"""run() applies a step's rows to recurrent states: checks, lanes, grid, and one dispatch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from metal_kernels import kernel, op_common, token_ops
from metal_kernels.sequences import RecurrenceInputs, Sequences, StatePart

_THREADS = 256  # per threadgroup
_RUNS = 2  # of four elements of a state's row, per lane; with more, registers spill
_KINDS = ("keys", "values", "rates", "decays")
_KERNEL = kernel.load(
    Path(__file__).with_name("recurrence.metal"),
    input_names=(
        *("table", "blocks", "queries", *_KINDS),
        *(f"kept_{name}" for name in _KINDS),
        *("log_rates", "key_pool", "value_pool", "after_0", "after_1"),
    ),
    output_names=("outputs", *(f"next_{name}" for name in _KINDS), "fence"),
    shared=("states.metal",),
)
# Kinds of decays, numbered as in the kernel.
_OF_HEADS, _OF_KEYS, _FROM_RATES = range(3)


def run(
    sequences: Sequences,
    queries: mx.array,
    inputs: RecurrenceInputs,
    kept: RecurrenceInputs | None,
    pools: Sequence[mx.array],
    part: StatePart,
    delta: bool,
    log_rates: mx.array | None = None,
    split: int = 1,
    after: Sequence[mx.array] = (),
) -> tuple[mx.array, RecurrenceInputs, mx.array]:
    """Applies a step's rows to the states of its requests: S as in `RecurrenceInputs`, y = S q.

    Computes in float32. States are rounded to their dtype after each token, so that results do not
    depend on how tokens are divided into steps.

    Args:
        sequences: the step, with num_rows = T.
        queries: [T, HK, DK] float16, bfloat16 or float32.
        inputs: T rows; keys have the queries' dtype, values one of the same three, rates and decays
            float32. HV is a multiple of HK.
        kept: `kept` as the previous step returned it; None: no request applies kept rows.
        pools: K and, if there is one, V: [Hkv, B * split, ...], row-contiguous, of one dtype and
            Hkv, with a multiple of 16 bytes per block and head. Written in place, before the fence.
        part: location of the [HV, DV, DK] floats among a state's bytes.
        delta: use the delta rule.
        log_rates: A, [HV, DK] float32, required if inputs.decays is None: decays are exp(rate * A).
        split: parts of a block.
        after: fences of dispatches to wait for.

    Returns:
        y: [T, HV, DV] in the values' dtype.
        kept: [sequences.num_kept, ...] each: inputs of the step's drafts.
        fence: [8] uint32.

    Raises:
        ValueError: shapes or dtypes are invalid.
    """
    decays = _check(sequences, queries, inputs, kept, log_rates)
    num_rows, (num_heads, value_size) = len(queries), inputs.values.shape[1:]
    pipeline = _template(sequences, queries, inputs, pools, part, split, delta, decays)
    # Whole simdgroups of 32 lanes.
    threads = -(-num_heads * value_size * pipeline["LANES"] // 32) * 32
    dtypes = [queries.dtype, inputs.values.dtype, inputs.rates.dtype, inputs.rates.dtype]
    bound = _bind(sequences, queries, (inputs, kept), dtypes, log_rates)
    y, keys, values, rates, found, fence = _KERNEL(
        inputs=[*bound, pools[0], pools[-1], *op_common.fences(after)],
        template=list(pipeline.items()),
        grid=(threads, len(sequences.table), 1),
        threadgroup=(min(_THREADS, threads), 1, 1),
        output_shapes=[
            (max(num_rows, 1), num_heads, value_size),
            *_kept_shapes(sequences.num_kept, inputs),
            op_common.FENCE_SHAPE,
        ],
        output_dtypes=[inputs.values.dtype, *dtypes, op_common.FENCE_DTYPE],
    )
    drafts = RecurrenceInputs(keys, values, rates, None if inputs.decays is None else found)
    return (y if num_rows else y[:0]), drafts, fence


def _template(
    sequences: Sequences,
    queries: mx.array,
    inputs: RecurrenceInputs,
    pools: Sequence[mx.array],
    part: StatePart,
    split: int,
    delta: bool,
    decays: int,
) -> dict[str, Any]:
    (num_keys, key_size), (num_heads, value_size) = queries.shape[1:], inputs.values.shape[1:]
    run_size = 4 if key_size % 4 == 0 else 1
    return {
        "T": queries.dtype,
        "V": inputs.values.dtype,
        "HK": num_keys,
        "DK": key_size,
        "HV": num_heads,
        "DV": value_size,
        "DELTA": delta,
        "DECAYS": decays,
        "LANES": _lanes(key_size // run_size),
        "RUN": run_size,
        "BLOCK_SIZE": sequences.block_size,
        **dict(token_ops.state_template(pools, part, (num_heads, value_size, key_size), split)),
    }


def _kept_shapes(count: int, inputs: RecurrenceInputs) -> list[tuple[int, ...]]:
    """Returns the shapes of `count` drafts' inputs, in the order of _KINDS."""
    kinds = [inputs.keys, inputs.values, inputs.rates]
    if inputs.decays is not None:
        kinds.append(inputs.decays)
    shapes = [(count, *rows.shape[1:]) for rows in kinds]
    return shapes if inputs.decays is not None else [*shapes, (kernel.MIN_ELEMENTS,)]


def _lanes(runs: int) -> int:
    """Returns how many lanes share a row of a state: a power of two, at least min(4, runs)."""
    wanted = max(-(-runs // _RUNS), min(4, runs))
    return int(min(32, 1 << (wanted - 1).bit_length()))


def _bind(
    sequences: Sequences,
    queries: mx.array,
    rows: Sequence[RecurrenceInputs | None],
    dtypes: Sequence[mx.Dtype],
    log_rates: mx.array | None,
) -> list[mx.array]:
    """Returns a step's input buffers, with placeholders for missing ones."""
    table, blocks = token_ops.step_inputs(sequences)
    bound = [table, blocks, token_ops.padded(queries)]
    for each in rows:
        for name, dtype in zip(_KINDS, dtypes, strict=True):
            array = None if each is None else getattr(each, name)
            bound.append(token_ops.NO_ROWS[dtype] if array is None else token_ops.padded(array))
    bound.append(
        token_ops.NO_ROWS[mx.float32] if log_rates is None else token_ops.padded(log_rates)
    )
    return bound


def _check(
    sequences: Sequences,
    queries: mx.array,
    inputs: RecurrenceInputs,
    kept: RecurrenceInputs | None,
    log_rates: mx.array | None,
) -> int:
    """Raises ValueError for invalid inputs; returns the kind of decays."""
    floats, single = op_common.VALUE_DTYPES, (mx.float32,)
    token_ops.check_rows("queries", queries, (sequences.num_rows, -1, -1), floats)
    token_ops.check_rows("inputs.values", inputs.values, (sequences.num_rows, -1, -1), floats)
    (num_keys, key_size), num_heads = queries.shape[1:], inputs.values.shape[1]
    if num_heads % num_keys:
        raise ValueError(f"inputs.values: expected a multiple of {num_keys} heads, as keys have")
    if (inputs.decays is None) != (log_rates is not None):
        raise ValueError("inputs.decays and log_rates: expected one of them")
    decays = _FROM_RATES
    if inputs.decays is not None:
        decays = _OF_HEADS if inputs.decays.ndim == 2 else _OF_KEYS
    if log_rates is not None:
        token_ops.check_rows("log_rates", log_rates, (num_heads, key_size), single)
    for name, rows, count in (("inputs", inputs, sequences.num_rows), ("kept", kept, -1)):
        if rows is None:
            continue
        if (rows.decays is None) != (inputs.decays is None):
            raise ValueError("kept.decays: expected if and only if inputs.decays is given")
        token_ops.check_rows(
            f"{name}.keys", rows.keys, (count, *queries.shape[1:]), (queries.dtype,)
        )
        of_values = (count, *inputs.values.shape[1:])
        token_ops.check_rows(f"{name}.values", rows.values, of_values, (inputs.values.dtype,))
        token_ops.check_rows(f"{name}.rates", rows.rates, (count, num_heads), single)
        if rows.decays is not None:
            shape = (count, num_heads) if decays == _OF_HEADS else (count, num_heads, key_size)
            token_ops.check_rows(f"{name}.decays", rows.decays, shape, single)
    return decays
