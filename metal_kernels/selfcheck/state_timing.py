# SPDX-License-Identifier: Apache-2.0
"""Times long prompts through the delta rule with our kernel and with MLX's chunked function."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from metal_kernels import kv_states, recurrence
from metal_kernels.op_common import BITS
from metal_kernels.selfcheck.case import BACKENDS, Case
from metal_kernels.selfcheck.states import make_pools, parts_of, recurrence_rows
from metal_kernels.selfcheck.timing import Call, in_turn
from metal_kernels.sequences import Sequences

_ROWS = (512, 2048)  # rows of a prompt's chunk
_CALLS = 4  # per round, queued together
_BLOCK = 1  # the block of the chunk's state


def compare(
    case: Case,
    prompts: Sequence[int] = _ROWS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Times our kernel and MLX's chunked function alternately, as `timing.compare` does.

    case: a layer with float32 states, the delta rule and one decay per head. prompts: numbers of
    rows to time. Returns median seconds per call, by BACKENDS ("metal", "mlx"), then call.
    """
    found: dict[str, dict[str, float]] = {backend: {} for backend in BACKENDS}
    for num_rows in prompts:
        times = in_turn(backend_calls(case, num_rows), _CALLS, clock)
        for backend, seconds in zip(BACKENDS, times, strict=True):
            found[backend][f"1 x {num_rows}"] = seconds
    return found


def backend_calls(case: Case, num_rows: int) -> tuple[Call, Call]:
    """Returns calls of our kernel and of MLX that advance a state by `num_rows` rows."""
    part = parts_of(case)[1]
    pools, split = make_pools(case, part, fill=0)
    kind = case.states
    assert kind is not None
    queries, inputs = recurrence_rows(np.random.default_rng(0), case, kind, num_rows)
    table = [0, num_rows, num_rows, 0, 0, 1, _BLOCK, _BLOCK, 0]
    nowhere = mx.zeros((1, num_rows // case.block_size + 1), mx.int32)
    tiles = mx.array([[0, 0]], mx.int32)  # for the convolution
    step = Sequences(
        mx.array([table], mx.int32), nowhere, tiles, case.block_size, num_rows, num_kept=1
    )
    size = math.prod(part.shape)
    width = -(-(part.start + 4 * size) // case.cache_dtype.size)
    blocks_np = np.array([_BLOCK])
    blocks = mx.array(blocks_np.astype(np.int32))

    def ours(fence: mx.array) -> list[mx.array]:
        out, _, done = recurrence.run(
            step, queries, inputs, None, pools, part, True, None, split, [fence]
        )
        return [done, out]

    given = (queries, inputs.keys, inputs.values, inputs.decays, inputs.rates)
    query, key, value, decay, rate = (array[None] for array in given if array is not None)

    def chunked(fence: mx.array) -> list[mx.array]:
        bits, read = kv_states.read(pools, blocks, width, split, [fence])
        state = bits.view(mx.uint8)[:, part.start :].view(part.dtype)[:, :size]
        out, state = mx.fast.gated_delta_update(
            query, key, value, decay, rate, state.reshape(1, *part.shape)
        )
        written = mx.concatenate(
            [bits.view(mx.uint8)[:, : part.start], state.reshape(1, -1).view(mx.uint8)], axis=1
        )
        return [kv_states.write(pools, blocks_np, _pad_bytes(written, case), split, [read]), out]

    return ours, chunked


def _pad_bytes(state: mx.array, case: Case) -> mx.array:
    """Pads states, as bytes, to a size that `kv_states.write` accepts."""
    size = case.cache_dtype.size
    missing = -state.shape[1] % size
    return (mx.pad(state, [(0, 0), (0, missing)]) if missing else state).view(BITS[size])
