# SPDX-License-Identifier: Apache-2.0
"""Describes one setting to tune: its layers, its search and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from metal_kernels.paged_attention import Tiles
from metal_kernels.selfcheck import Case
from metal_kernels.tuner.search import Found, Measure
from metal_kernels.tuner.stopwatch import Stopwatch, Timing


@dataclass(frozen=True)
class Layer:
    """A kind of layer to tune: its self-check results, and the batches to time."""

    case: Case
    tiles: Tiles  # that passed their self-check
    states: bool = False  # whether the recurrence kernel passed
    gathered: bool = False  # whether MLX's attention of prompts passed
    cores: int | None = None  # of the GPU
    #: Batches to time, smaller in tests: positions of a long context, rows of prompts.
    context: int = 32768
    prompts: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Chosen:
    """The values that a search chose, and their speedup over the defaults."""

    #: Maps the choice's fields to values; None: the default, or never.
    values: Mapping[str, Any] = field(default_factory=dict)
    gain: float = 1.0  # time of the defaults over that of the values


class Search(Protocol):
    def __call__(self, layer: Layer, stopwatch: Stopwatch) -> Chosen:
        """Finds the fastest values for a layer, with at most 24 timings.

        Raises Unsteady: the machine is unsteady.
        """
        ...


@dataclass(frozen=True)
class Choice:
    """A setting that is tuned within one process; an entry of the registry."""

    name: str  # for users
    wanted: Callable[[Layer], bool]  # selects kinds of layers
    search: Search
    #: Each kind of layer has its own value; else the first selected one decides.
    of_layer: bool = True


@dataclass(frozen=True)
class ProcessChoice:
    """An entry of the registry for a number that MLX reads once per process.

    Each candidate is therefore timed in its own process.
    """

    name: str  # for users
    #: Takes a function that times a number in its own process, and the current number.
    search: Callable[[Measure[int], int], Found[int]]
    time: Callable[[Stopwatch], Timing]  # within such a process
    usual: int  # MLX's default
