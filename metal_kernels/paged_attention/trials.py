# SPDX-License-Identifier: Apache-2.0
"""Makes small plans that launch every pipeline of a layer, to compile them at startup."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from metal_kernels.paged_attention.plan import AttentionPlan, plan
from metal_kernels.paged_attention.shape import AttentionShape
from metal_kernels.paged_attention.splits import ALWAYS, WHOLE
from metal_kernels.paged_attention.tiles import STRIP, WIDE_ROWS, Tiles


def trials(
    shape: AttentionShape, window: int | None, tiles: Tiles, extent: int | None = None
) -> Iterator[AttentionPlan]:
    """Yields small plans that launch every pipeline that plans with `tiles` may launch.

    Each has one request, of up to tiles.prefill[-1] rows, in block 0 only.
    """
    kinds = [(True, rows, False) for rows in tiles.decode]
    kinds += [(True, WIDE_ROWS, True)] if tiles.wide else []
    kinds += [(False, rows, False) for rows in tiles.prefill]
    for decode, rows, wide in kinds:
        # Query rows that fill a tile. A tile smaller than a query row may reach into the next one,
        # and then sees one key more.
        queries = [rows // shape.group] if rows >= shape.group else [1, 2]
        # The shortest context that is split, and the shortest with a window: its first key is
        # rounded down to a strip, so one of four contexts is longest.
        lengths = [queries[0]] + (
            [WHOLE + 1, *(2 * WHOLE + k for k in range(STRIP))] if tiles.split and not wide else []
        )
        made = {
            trial.pipelines: trial
            for trial in (
                plan(
                    np.array([0, query], np.int32),
                    np.array([query + length], np.int32),
                    np.zeros((1, -(-(query + length) // 16)), np.int32),
                    shape,
                    window,
                    replace(tiles.only(decode, rows), wide=wide),
                    splits=ALWAYS,
                    extent=extent,
                )
                for query in queries
                for length in lengths
            )
        }
        yield from made.values()
