# SPDX-License-Identifier: Apache-2.0
"""Rotations by position that a layer has asked for, so that whoever keeps its keys may do them.

mlx-lm's modules rotate queries and keys before they call the cache, each by an operation of its
own (`mx.fast.rope`, which all of mlx-lm's ropes end in). MLX computes an array only where somebody
reads it. So the call goes on as it would, and what it was made of is noted: a cache that is given
such keys may take them as they were before, and rotate them itself. Then nobody reads the rotated
ones. Whoever does read them, or anything made of them, has them rotated, as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from metal_kernels.kv_write import Rotation
from vllm_metal.patches.mlx_patches.replacing import replaced

RELEASES = ("mlx 0.32",)
_HOW = ("traditional", "base", "scale")
#: A layer rotates queries and keys. What nobody asked for goes: it holds arrays.
_KEPT = 4


@dataclass(frozen=True, eq=False)
class Rotated:
    """One call of `mx.fast.rope` for rows of length 1, each at a position of its own."""

    source: mx.array  # [T, H, 1, D], before
    result: mx.array  # [T, H, 1, D], after
    positions: mx.array  # [T]
    rotation: Rotation

    def alike(self, other: Rotated) -> bool:
        """Whether both are rotated by the same positions, in the same way."""
        same = self.positions is other.positions and self.source.dtype == other.source.dtype
        return same and self.rotation.same_as(other.rotation)


class OfLayer(NamedTuple):
    """Keys of a layer, and its queries where they were rotated alike before."""

    keys: Rotated
    queries: Rotated | None


_newest: deque[Rotated] = deque(maxlen=_KEPT)


@contextmanager
def noted() -> Iterator[None]:
    """Within, `of_keys` knows what was rotated last."""
    rope = mx.fast.rope

    def rotate(x: mx.array, dims: int, **options: Any) -> mx.array:
        result = rope(x, dims, **options)
        offset = options["offset"]
        if isinstance(offset, mx.array) and x.ndim == 4 and x.shape[2] == 1:
            traditional, base, scale = (options[name] for name in _HOW)
            by = traditional, base, scale, options.get("freqs")
            rotation = Rotation.of(dims, *by, x.dtype)
            if rotation is not None:
                _newest.append(Rotated(x, result, offset, rotation))
        return result

    try:
        with replaced(mx.fast, "rope", rotate):
            yield
    finally:
        _newest.clear()


def of_keys(positions: mx.array, *given: mx.array) -> OfLayer | None:
    """What a layer's keys were before they were rotated; None: that is not known.

    Forgets what was noted.

    Args:
        positions: [T], as the layer's cache handed them to it.
        given: [T, Hkv, 1, D] each, what the layer hands to its cache; one of them its keys.
    """
    known = list(_newest)
    _newest.clear()
    of = next((each for each in known if any(each.result is array for array in given)), None)
    if of is None or of.positions is not positions:
        return None
    size = of.source.shape[-1]
    beside = (each for each in reversed(known) if each is not of and each.alike(of))
    return OfLayer(of, next((each for each in beside if each.source.shape[-1] == size), None))
