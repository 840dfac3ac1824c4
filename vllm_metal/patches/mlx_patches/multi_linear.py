# SPDX-License-Identifier: Apache-2.0
"""Projects all rows of a step into or out of MLA latents with one matrix product per head.

A cache may also make a module skip these projections, and apply them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models import mla

from vllm_metal.patches.vllm_patches.replacing import replace

RELEASES = ("mlx-lm 0.32",)
_is_skipping = False


def install() -> None:
    """Patches mlx-lm's projections of latents; idempotent."""
    for cls in (mla.MultiLinear, mla.QuantizedMultiLinear):
        replace(cls, "__call__", _multiply_by_head)


@contextmanager
def left_out() -> Iterator[None]:
    """Makes projections of latents return their input within the block."""
    global _is_skipping
    before, _is_skipping = _is_skipping, True
    try:
        yield
    finally:
        _is_skipping = before


def sizes(projection: Any) -> tuple[int, int]:
    """Returns the elements of an input row and of an output row."""
    num_outputs, num_inputs = projection.weight.shape[1:]
    if isinstance(projection, mla.QuantizedMultiLinear):
        num_inputs = projection.scales.shape[-1] * projection.group_size
    return num_inputs, num_outputs


def matrices(projection: Any, heads: slice, dtype: mx.Dtype) -> mx.array:
    """Returns [h, out, in] matrices of some heads in `dtype`."""
    weight: mx.array = projection.weight[heads]
    if not isinstance(projection, mla.QuantizedMultiLinear):
        return weight
    # Dequantized for many rows: MLX's CPU backend multiplies these ten times faster.
    biases = None if projection.biases is None else projection.biases[heads]
    packing = projection.group_size, projection.bits, projection.mode
    return mx.dequantize(weight, projection.scales[heads], biases, *packing, dtype=dtype)


def _multiply_by_head(
    call: Callable[..., mx.array], self: Any, x: mx.array, transpose: bool = True
) -> mx.array:
    """Maps [T, H, 1, in] to [T, H, 1, out]; other shapes use mlx-lm's code."""
    of_rows = x.ndim == 4 and x.shape[1:3] == (len(self.weight), 1)
    if of_rows and _is_skipping:
        return x
    if not of_rows or len(x) == 1:
        return call(self, x, transpose)
    # The weight is a matrix per head, [H, out, in]. For [B, H, 1, in], B rows of length 1, mlx-lm
    # would compute B * H matrix-vector products that each read their matrix. With the rows side by
    # side it computes H matrix products, for quantized weights too.
    return call(self, x.swapaxes(0, 2), transpose).swapaxes(0, 2)
