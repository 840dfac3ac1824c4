# SPDX-License-Identifier: Apache-2.0
"""Helpers for benchmarks: progress notes, prompts without shared prefixes, tables."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

_started = time.monotonic()


def note(text: str) -> None:
    """Prints a line with the elapsed time and the machine's load."""
    load = os.getloadavg()[0]
    print(f"[{time.monotonic() - _started:5.0f} s, load {load:.1f}] {text}", file=sys.stderr)


class Prompts:
    """Makes prompts that share no prefix."""

    def __init__(self, vocabulary: int) -> None:
        self._rng = np.random.default_rng(0)
        self._vocabulary = vocabulary

    def new(self, length: int) -> list[int]:
        """Returns random tokens."""
        return self._rng.integers(4, self._vocabulary, length).tolist()


@contextmanager
def on_core(number: int) -> Iterator[None]:
    """Runs processes started in the block on one processor, a different one for each number."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[number % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a Markdown table; all columns but the first are right-aligned."""
    print("| " + " | ".join(headers) + " |")
    print("| --- |" + " ---: |" * (len(headers) - 1))
    for row in rows:
        cells = [_cell(value) for value in row]
        print("| " + " | ".join(cells) + " |")
    print(flush=True)


def _cell(value: object) -> str:
    """Formats a value; None becomes a dash."""
    if value is None:
        return "–"
    return digits(value) if isinstance(value, float) else str(value)


def digits(figure: float) -> str:
    """Formats with three significant digits, or all digits before the point."""
    return f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
