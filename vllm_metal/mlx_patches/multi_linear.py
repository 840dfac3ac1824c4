# SPDX-License-Identifier: Apache-2.0
"""Projections into latents and out of them: for all rows of a step one matrix product a head.

Such a projection has a matrix a head, [H, out, in]. mlx-lm multiplies it with [B, H, L, in]; the
rows of a step are B rows of length 1, so these are B * H products of a matrix and a vector, each of
which reads its matrix. With the rows beside each other there are H products, for quantised weights
as for others.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models import mla

from vllm_metal.vllm_patches.replacing import replace

RELEASES = ("mlx-lm 0.32",)
_Projection = mla.MultiLinear | mla.QuantizedMultiLinear


def install() -> None:
    """Has mlx-lm's projections of latents multiply so; idempotent."""
    for cls in (mla.MultiLinear, mla.QuantizedMultiLinear):
        replace(cls, "__call__", _beside_each_other)


def _beside_each_other(
    call: Callable[..., mx.array], self: _Projection, x: mx.array, transpose: bool = True
) -> mx.array:
    """[T, H, 1, out] of [T, H, 1, in]; whatever else there is, as mlx-lm has it."""
    of_rows = x.ndim == 4 and x.shape[1:3] == (len(self.weight), 1) and len(x) > 1
    if not of_rows:
        return call(self, x, transpose)
    return call(self, x.swapaxes(0, 2), transpose).swapaxes(0, 2)
