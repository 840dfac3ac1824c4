# SPDX-License-Identifier: Apache-2.0
"""Measures the machine's peak speeds and the share of them that our attention reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from metal_kernels.selfcheck import contiguous, timing
from metal_kernels.tuner.choice import Layer
from metal_kernels.tuner.stopwatch import Run, Stopwatch

_COPIED = 2**28  # bytes
_MATRIX = 4096  # rows and columns
_CHAIN = 512  # dispatches


@dataclass(frozen=True)
class Share:
    """Times of one batch's attention by our kernels, and by MLX's on contiguous K and V."""

    name: str
    moved: int  # bytes of K and V to read
    ours: float  # seconds
    mlx: float | None  # seconds; None: MLX does not support such a layer


def facts(
    stopwatch: Stopwatch, copied: int = _COPIED, matrix: int = _MATRIX, chain: int = _CHAIN
) -> dict[str, float]:
    """Measures bytes/s of a copy, FLOP/s of a float16 product, and seconds per dispatch.

    copied: bytes. matrix: rows and columns of each factor. chain: dependent dispatches.
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
    """Times decodes over one long context and eight short ones, and a chunk of a prompt."""
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
        if contiguous.serves(case):
            call = contiguous.attend(case, requests, query, keys, timing.rotated_here())
            theirs = stopwatch.time_call(f"{name} by MLX", call).seconds
        yield Share(name, sides * requests * keys * over.row_bytes, ours.seconds, theirs)
