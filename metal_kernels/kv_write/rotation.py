# SPDX-License-Identifier: Apache-2.0
"""Defines Rotation: how a write rotates keys and queries by their positions."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from metal_kernels.kernel import MIN_ELEMENTS


class RotationKind(NamedTuple):
    """Compile-time parameters of a rotation."""

    dims: int  # rotated elements of a row
    first: int = 0  # index of the first one
    traditional: bool = False  # pairs are neighbors; else dims / 2 apart
    listed: bool = False  # frequencies are an array; else powers of a base

    def to_json(self) -> list[Any]:
        return list(self)

    def __str__(self) -> str:
        pairs = "neighbors" if self.traditional else "halves"
        return f"{self.dims} elements rotated by {pairs}{', by a list' if self.listed else ''}"


@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotates pairs by position (Su et al. 2021, arXiv:2104.09864), as `mx.fast.rope` does.

    Pair i of a row at position p turns by the angle scale * p * base^(-2i / dims), or by scale * p
    / frequencies[i].
    """

    kind: RotationKind
    scale: float = 1.0
    base: float | None = None
    frequencies: mx.array | None = None  # [dims / 2] float32

    @staticmethod
    def of(
        dims: int,
        traditional: bool,
        base: float | None,
        scale: float,
        frequencies: mx.array | None,
        dtype: mx.Dtype,
    ) -> Rotation | None:
        """Converts arguments of `mx.fast.rope` for rows of `dtype`; None if not supported."""
        kind = RotationKind(dims, 0, traditional, frequencies is not None)
        if dims < 2 or dims % 2 or dtype not in (mx.float16, mx.bfloat16, mx.float32):
            return None
        if frequencies is None:
            known = isinstance(base, (int, float)) and base > 0
            return Rotation(kind, float(scale), float(base)) if known and base else None
        few = frequencies.size < MIN_ELEMENTS  # passed as constants, which needs another pipeline
        if few or frequencies.shape != (dims // 2,) or frequencies.dtype != mx.float32:
            return None
        return Rotation(kind, float(scale), None, frequencies)

    @staticmethod
    def of_zeros(kind: RotationKind) -> Rotation:
        """Returns a rotation of this kind to compile and to measure with."""
        listed = mx.ones(kind.dims // 2) if kind.listed else None
        return Rotation(kind, 1.0, None if kind.listed else 10000.0, listed)

    def from_element(self, first: int) -> Rotation:
        """Returns this rotation for elements from `first` on."""
        return replace(self, kind=self.kind._replace(first=first))

    def same_as(self, other: Rotation) -> bool:
        """Returns whether both rotate identically."""
        same = self.frequencies is other.frequencies
        return same and (self.kind, self.scale, self.base) == (other.kind, other.scale, other.base)

    @property
    def angles(self) -> mx.array:
        """[8] float32, as the kernel reads it: the scale, log2 of the base, zeros."""
        return _angles(self.scale, self.base)


@functools.cache
def _angles(scale: float, base: float | None) -> mx.array:
    # Computed and cached, so that graphs take it as an existing array.
    angles = mx.array([scale, math.log2(base or 1.0), *[0.0] * (MIN_ELEMENTS - 2)])
    mx.eval(angles)
    return angles
