# SPDX-License-Identifier: Apache-2.0
"""run() convolves a step's rows per channel: checks, grid, and one dispatch."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from metal_kernels import kernel, op_common, token_ops
from metal_kernels.sequences import TILE_ROWS, Sequences, StatePart

_THREADS = 256  # per threadgroup
_KERNEL = kernel.load(
    Path(__file__).with_name("convolution.metal"),
    input_names=(
        *("table", "blocks", "tiles"),
        *("inputs", "kept", "weight", "bias", "key_pool", "value_pool"),
        *("after_0", "after_1"),
    ),
    output_names=("out", "next_kept", "fence"),
    shared=("states.metal",),
)


def run(
    sequences: Sequences,
    inputs: mx.array,
    kept: mx.array | None,
    weight: mx.array,
    bias: mx.array | None,
    pools: Sequence[mx.array],
    part: StatePart,
    split: int = 1,
    after: Sequence[mx.array] = (),
    state_bytes: int | None = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Convolves all rows of a step, and updates the states of its requests.

    Output of row t: bias + sum over k of weight[:, k] * input[t + k - K + 1], where the rows before
    a request's first one are its applied kept rows, then its state, and zeros before position 0.
    A state holds a request's newest K - 1 inputs, oldest first.

    Args:
        sequences: the step, with num_rows = T.
        inputs: [T, C] float16, bfloat16 or float32; at least 8 channels.
        kept: [P', C] of the previous step, in the inputs' dtype; None: no request applies any.
        weight: [C, K] or [C, K, 1] floats, K from 2 to TILE_ROWS + 1.
        bias: [C] floats; None: zeros.
        pools: K and, if there is one, V: [Hkv, B * split, ...], row-contiguous, of one dtype and
            Hkv, with a multiple of 16 bytes per block and head. Written in place, before the fence.
        part: location of the [K - 1, C] floats among a state's bytes.
        split: parts of a block.
        after: fences of dispatches to wait for.
        state_bytes: size of the whole state. The rest of each block's K is cleared, and of its V if
            the state extends into V. None: clear nothing.

    Returns:
        out: [T, C] in the inputs' dtype, summed in float32.
        kept: [sequences.num_kept, C] in the inputs' dtype: inputs of the step's drafts.
        fence: [8] uint32.

    Raises:
        ValueError: shapes or dtypes are invalid.
    """
    # A block that gets a state, other than the one it was read from, must keep nothing of its last
    # owner: zeros fill up the part's last 16 bytes, and the block behind the whole state.
    bound = _check_and_bind(sequences, inputs, kept, weight, bias)
    num_rows, num_channels = inputs.shape
    out, next_kept, fence = _KERNEL(
        inputs=[*bound, pools[0], pools[-1], *op_common.fences(after)],
        template=_template(sequences, inputs.dtype, weight, bias, pools, part, split, state_bytes),
        grid=(num_channels, len(sequences.tiles), 1),
        threadgroup=(min(_THREADS, num_channels), 1, 1),
        output_shapes=[
            (max(num_rows, 1), num_channels),
            (sequences.num_kept, num_channels),
            op_common.FENCE_SHAPE,
        ],
        output_dtypes=[inputs.dtype, inputs.dtype, op_common.FENCE_DTYPE],
    )
    return (out if num_rows else out[:0]), next_kept, fence


def _template(
    sequences: Sequences,
    dtype: mx.Dtype,
    weight: mx.array,
    bias: mx.array | None,
    pools: Sequence[mx.array],
    part: StatePart,
    split: int,
    state_bytes: int | None,
) -> list[tuple[str, Any]]:
    num_channels, num_taps = weight.shape[:2]
    state = token_ops.state_template(pools, part, (num_taps - 1, num_channels), split)
    end = part.start + math.prod(part.shape) * part.dtype.size
    cleared = (
        (end, end)
        if state_bytes is None
        else (state_bytes, _usable_bytes(pools, state_bytes, split))
    )
    return [
        ("T", dtype),
        ("TAPS", num_taps),
        ("HAS_BIAS", bias is not None),
        ("BLOCK_SIZE", sequences.block_size),
        ("TILE_ROWS", TILE_ROWS),
        ("END", end),
        ("CLEAR_FROM", cleared[0]),
        ("CLEAR_TO", cleared[1]),
        *state,
    ]


def _usable_bytes(pools: Sequence[mx.array], state_bytes: int, split: int) -> int:
    """Returns the bytes of a block that a state may use: those of K, or of K and V."""
    sizes = [op_common.block_elements(pool, split) * pool.dtype.size for pool in pools]
    return sizes[0] if state_bytes <= sizes[0] else sum(sizes)


def _check_and_bind(
    sequences: Sequences,
    inputs: mx.array,
    kept: mx.array | None,
    weight: mx.array,
    bias: mx.array | None,
) -> list[mx.array]:
    table, blocks = token_ops.step_inputs(sequences)
    floats = op_common.VALUE_DTYPES
    token_ops.check_rows("inputs", inputs, (sequences.num_rows, -1), floats)
    after = (1,) if weight.ndim == 3 else ()
    token_ops.check_rows("weight", weight, (inputs.shape[1], -1, *after), floats)
    num_channels, num_taps = weight.shape[:2]
    if num_channels < kernel.MIN_ELEMENTS or not 2 <= num_taps <= TILE_ROWS + 1:
        raise ValueError(
            f"weight: expected {kernel.MIN_ELEMENTS} channels or more and 2 to {TILE_ROWS + 1} "
            f"taps, found {weight.shape}"
        )
    if kept is not None:
        token_ops.check_rows("kept", kept, (-1, num_channels), (inputs.dtype,))
    if bias is not None:
        token_ops.check_rows("bias", bias, (num_channels,), floats)
    return [
        table,
        blocks,
        token_ops.padded(sequences.tiles),
        token_ops.padded(inputs),
        token_ops.NO_ROWS[inputs.dtype] if kept is None else kept,
        weight,
        token_ops.NO_ROWS[inputs.dtype] if bias is None else bias,
    ]
