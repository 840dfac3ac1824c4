# SPDX-License-Identifier: Apache-2.0
"""Records rotary embeddings of a layer, so that its cache can rotate the keys itself."""

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
#: A layer rotates queries and keys. Drop older records, because they hold arrays.
_KEPT = 4


@dataclass(frozen=True, eq=False)
class Rotated:
    """One call of `mx.fast.rope` for rows of length 1, each with its own position."""

    source: mx.array  # [T, H, 1, D], unrotated
    result: mx.array  # [T, H, 1, D], rotated
    positions: mx.array  # [T]
    rotation: Rotation

    def same_rotation(self, other: Rotated) -> bool:
        """Returns whether the other call has the same positions and rotation."""
        same = self.positions is other.positions and self.source.dtype == other.source.dtype
        return same and self.rotation.same_as(other.rotation)


class OfLayer(NamedTuple):
    """Recorded rotation of a layer's keys, and of its queries if it was the same."""

    keys: Rotated
    queries: Rotated | None


_newest: deque[Rotated] = deque(maxlen=_KEPT)


@contextmanager
def noted() -> Iterator[None]:
    """Makes `of_keys` track the newest rotations within the block."""
    rope = mx.fast.rope

    def rotate(x: mx.array, dims: int, **options: Any) -> mx.array:
        # mlx-lm's modules rotate queries and keys before they call the cache; all of its ropes end
        # here. MLX computes an array only when it is read, so the call runs as usual: if the cache
        # takes the recorded input and rotates it itself, the result is never computed, unless
        # someone else reads it.
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
    """Finds the recorded rotation of a layer's keys; None if there is none. Clears all records.

    positions: [T], as the layer's cache provided them. given: [T, Hkv, 1, D] each, arrays that the
    layer passes to its cache, among them its keys.
    """
    known = list(_newest)
    _newest.clear()
    of = next((each for each in known if any(each.result is array for array in given)), None)
    # Compare by identity: only the cache's own array is certain to hold the rows' positions.
    if of is None or of.positions is not positions:
        return None
    size = of.source.shape[-1]
    others = (each for each in reversed(known) if each is not of and each.same_rotation(of))
    return OfLayer(of, next((each for each in others if each.source.shape[-1] == size), None))
