# SPDX-License-Identifier: Apache-2.0
"""Projections into latents and out of them: for all rows of a step one matrix product a head.

Such a projection has a matrix a head, [H, out, in]. mlx-lm multiplies it with [B, H, L, in]; the
rows of a step are B rows of length 1, so these are B * H products of a matrix and a vector, each of
which reads its matrix. With the rows beside each other there are H products, for quantized weights
as for others. A cache may also leave them out of a module's call, and apply them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models import mla

from vllm_metal.patches.vllm_patches.replacing import replace

RELEASES = ("mlx-lm 0.32",)
_are_left_out = False


def install() -> None:
    """Has mlx-lm's projections of latents multiply so; idempotent."""
    for cls in (mla.MultiLinear, mla.QuantizedMultiLinear):
        replace(cls, "__call__", _beside_each_other)


@contextmanager
def left_out() -> Iterator[None]:
    """Within, projections give a step's rows back as they are."""
    global _are_left_out
    before, _are_left_out = _are_left_out, True
    try:
        yield
    finally:
        _are_left_out = before


def sizes(projection: Any) -> tuple[int, int]:
    """Elements of a row that goes in, and of one that comes out."""
    num_outputs, num_inputs = projection.weight.shape[1:]
    if isinstance(projection, mla.QuantizedMultiLinear):
        num_inputs = projection.scales.shape[-1] * projection.group_size
    return num_inputs, num_outputs


def matrices(projection: Any, heads: slice, dtype: mx.Dtype) -> mx.array:
    """[h, out, in] matrices of some heads, as values of the dtype.

    For many rows: MLX's CPU backend multiplies these ten times faster than quantized ones.
    """
    weight: mx.array = projection.weight[heads]
    if not isinstance(projection, mla.QuantizedMultiLinear):
        return weight
    biases = None if projection.biases is None else projection.biases[heads]
    packing = projection.group_size, projection.bits, projection.mode
    return mx.dequantize(weight, projection.scales[heads], biases, *packing, dtype=dtype)


def _beside_each_other(
    call: Callable[..., mx.array], self: Any, x: mx.array, transpose: bool = True
) -> mx.array:
    """[T, H, 1, out] of [T, H, 1, in]; whatever else there is, as mlx-lm has it."""
    of_rows = x.ndim == 4 and x.shape[1:3] == (len(self.weight), 1)
    if of_rows and _are_left_out:
        return x
    if not of_rows or len(x) == 1:
        return call(self, x, transpose)
    return call(self, x.swapaxes(0, 2), transpose).swapaxes(0, 2)
