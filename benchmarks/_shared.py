# SPDX-License-Identifier: Apache-2.0
"""What benchmarks share: notes as they go, texts without a common beginning, tables."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import numpy as np

_started = time.monotonic()


def note(text: str) -> None:
    """Prints a line with the time since the start and the machine's load."""
    load = os.getloadavg()[0]
    print(f"[{time.monotonic() - _started:5.0f} s, load {load:.1f}] {text}", file=sys.stderr)


class Prompts:
    """Texts that no two of share a beginning."""

    def __init__(self, vocabulary: int) -> None:
        self._rng = np.random.default_rng(0)
        self._vocabulary = vocabulary

    def new(self, length: int) -> list[int]:
        """Random tokens."""
        return self._rng.integers(4, self._vocabulary, length).tolist()


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints Markdown; all columns but the first are aligned to the right."""
    print("| " + " | ".join(headers) + " |")
    print("| --- |" + " ---: |" * (len(headers) - 1))
    for row in rows:
        cells = [digits(cell) if isinstance(cell, float) else str(cell) for cell in row]
        print("| " + " | ".join(cells) + " |")
    print(flush=True)


def digits(figure: float) -> str:
    """Three of them, or all before the point."""
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
