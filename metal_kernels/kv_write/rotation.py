# SPDX-License-Identifier: Apache-2.0
"""Rotation says how keys and queries are rotated by their positions where a write does it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from metal_kernels.kernel import MIN_ELEMENTS


class RotationKind(NamedTuple):
    """What a pipeline is compiled for."""

    dims: int  # elements of a row that are rotated
    first: int = 0  # of the row, the first of them
    traditional: bool = False  # pairs are neighbors; else dims / 2 apart
    listed: bool = False  # frequencies are an array; else powers of a base

    def to_json(self) -> list[Any]:
        return list(self)

    def __str__(self) -> str:
        pairs = "neighbors" if self.traditional else "halves"
        return f"{self.dims} elements rotated by {pairs}{', by a list' if self.listed else ''}"


@dataclass(frozen=True, eq=False)
class Rotation:
    """A rotation of pairs by position (Su et al. 2021, arXiv:2104.09864), as `mx.fast.rope` has it.

    Pair i of a row at position p turns by the angle scale * p * base^(-2i / dims), or by
    scale * p / frequencies[i].
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
        """By arguments of `mx.fast.rope`; None: the kernel does not take them.

        Args:
            dims, traditional, base, scale, frequencies: as MLX's.
            dtype: of the rows.
        """
        kind = RotationKind(dims, 0, traditional, frequencies is not None)
        if dims < 2 or dims % 2 or dtype not in (mx.float16, mx.bfloat16, mx.float32):
            return None
        if frequencies is None:
            known = isinstance(base, (int, float)) and base > 0
            return Rotation(kind, float(scale), float(base)) if known and base else None
        few = frequencies.size < MIN_ELEMENTS  # would be constants, and so another pipeline
        if few or frequencies.shape != (dims // 2,) or frequencies.dtype != mx.float32:
            return None
        return Rotation(kind, float(scale), None, frequencies)

    @staticmethod
    def of_zeros(kind: RotationKind) -> Rotation:
        """One of the kind, of no meaning, to compile and to measure."""
        listed = mx.ones(kind.dims // 2) if kind.listed else None
        return Rotation(kind, 1.0, None if kind.listed else 10000.0, listed)

    def from_element(self, first: int) -> Rotation:
        """This rotation, of the elements that begin at `first`."""
        return replace(self, kind=self.kind._replace(first=first))

    def same_as(self, other: Rotation) -> bool:
        """Whether it turns alike."""
        alike = self.frequencies is other.frequencies
        return alike and (self.kind, self.scale, self.base) == (other.kind, other.scale, other.base)

    @property
    def angles(self) -> mx.array:
        """[8] float32: the scale, and log2 of the base."""
        return _angles(self.scale, self.base)


@functools.cache
def _angles(scale: float, base: float | None) -> mx.array:
    """Kept, so that a graph takes it as a value that is there."""
    angles = mx.array([scale, math.log2(base or 1.0), *[0.0] * (MIN_ELEMENTS - 2)])
    mx.eval(angles)
    return angles
