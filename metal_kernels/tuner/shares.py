# SPDX-License-Identifier: Apache-2.0
"""Measures what the machine does at most, and which share of it our attention reaches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from metal_kernels.op_common import CODE_DTYPES
from metal_kernels.selfcheck import timing
from metal_kernels.selfcheck.timing import ROTATED, Call
from metal_kernels.tuner.choice import Layer
from metal_kernels.tuner.stopwatch import Run, Stopwatch

_COPIED = 2**28  # bytes
_MATRIX = 4096  # rows and columns
_CHAIN = 512  # dispatches


@dataclass(frozen=True)
class Share:
    """One batch's attention, by our kernels and by MLX's over K and V side by side in memory."""

    name: str
    moved: int  # bytes of K and V that it must read
    ours: float  # seconds
    mlx: float | None  # seconds; None: MLX has none for such a layer


def facts(
    stopwatch: Stopwatch, copied: int = _COPIED, matrix: int = _MATRIX, chain: int = _CHAIN
) -> dict[str, float]:
    """Bytes a second of a copy, FLOPs a second of a float16 product, seconds of a dispatch.

    Args:
        stopwatch: to time with.
        copied: bytes.
        matrix: rows and columns of each factor.
        chain: dispatches, each of which waits for the one before.
    """
    source = mx.zeros(copied // 4, mx.float32)
    factor = mx.zeros((matrix, matrix), mx.float16)
    row = mx.ones((1024,))
    mx.eval(source, factor, row)

    def in_a_row(count: int) -> None:
        for _ in range(count):
            last = row
            for _ in range(chain):
                last = mx.fast.rms_norm(last, row, 1e-6)
            mx.eval(last)

    def separately(make: Callable[[], mx.array]) -> Run:
        def run(count: int) -> None:
            for _ in range(count):
                mx.eval(make())

        return run

    copy = stopwatch.time("a copy", separately(lambda: source + 1))
    product = stopwatch.time("a product", separately(lambda: factor @ factor))
    dispatch = stopwatch.time("dispatches in a row", in_a_row)
    return {
        "copy_bytes_per_second": 2 * copied / copy.seconds,
        "matmul_flops_per_second": 2 * matrix**3 / product.seconds,
        "dispatch_seconds": dispatch.seconds / chain,
    }


def shares(layer: Layer, stopwatch: Stopwatch) -> Iterator[Share]:
    """Shares of decode over one long context, over eight short ones, and of a prompt's chunk."""
    case, context = layer.case, layer.context
    batches = ((1, 1, context), (8, 1, context // 8), (1, context // 64, context // 8))
    over = timing.Layer(case, context)
    sides = 1 if case.shape.latent else 2
    for requests, query, keys in batches:
        name = f"{requests} x {query} of {keys}"
        ours = stopwatch.time_call(
            f"{name} by our kernels", over.attend(requests, query, keys, layer.tiles)
        )
        theirs = None
        plain = case.window is None and case.softcap is None and not case.shape.latent
        if plain and case.cache_dtype not in CODE_DTYPES:
            call = _by_mlx(layer, requests, query, keys)
            theirs = stopwatch.time_call(f"{name} by MLX", call).seconds
        yield Share(name, sides * requests * keys * over.row_bytes, ours.seconds, theirs)


def _by_mlx(layer: Layer, requests: int, query: int, keys: int) -> Call:
    """MLX's own attention, over ROTATED bytes of K and V on a GPU."""
    shape, dtype = layer.case.shape, layer.case.dtype
    size = 2 * requests * shape.num_kv_heads * keys * shape.head_size * dtype.size
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    copies = -(-ROTATED // size) if on_gpu else 1
    pairs = [
        [mx.zeros((requests, shape.num_kv_heads, keys, shape.head_size), dtype) for _ in range(2)]
        for _ in range(copies)
    ]
    queries = mx.ones((requests, shape.num_heads, query, shape.head_size), dtype)
    mx.eval(pairs, queries)
    turn, scale = itertools.cycle(pairs), shape.head_size**-0.5

    def call(fence: mx.array) -> list[mx.array]:
        # Each call waits for the one before, as layers do.
        first = queries + fence[0].astype(dtype)
        out = mx.fast.scaled_dot_product_attention(
            first, *next(turn), scale=scale, mask="causal" if query > 1 else None
        )
        done = (out.reshape(-1)[:1] * 0).astype(fence.dtype)
        return [mx.broadcast_to(done, fence.shape), out]

    return call
