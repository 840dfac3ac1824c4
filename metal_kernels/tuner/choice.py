# SPDX-License-Identifier: Apache-2.0
"""Describes one thing that the tuner finds: on which layers, how, and what comes out."""

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
    """A kind of layer, and what is known of it before anything is timed."""

    case: Case
    tiles: Tiles  # that passed their self-check
    states: bool = False  # whether the kernel of its recurrence did
    gathered: bool = False  # whether MLX's attention of prompts did
    cores: int | None = None  # of the GPU
    #: Batches to time with, smaller ones for tests: positions of a long context, rows of prompts.
    context: int = 32768
    prompts: tuple[int, ...] = (64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Chosen:
    """What a choice came to."""

    #: By name of the choice's fields. None as a value: as it is by default, or never.
    values: Mapping[str, Any] = field(default_factory=dict)
    gain: float = 1.0  # the time of the defaults over its own


class Search(Protocol):
    def __call__(self, layer: Layer, stopwatch: Stopwatch) -> Chosen:
        """Searches, in 24 timings at most.

        Raises:
            Unsteady: the machine is.
        """
        ...


@dataclass(frozen=True)
class Choice:
    """A row of the registry."""

    name: str  # for people
    wanted: Callable[[Layer], bool]  # on which kinds of layer
    search: Search
    #: Whether each kind of layer has its own value; else the first one that is wanted decides.
    of_layer: bool = True


@dataclass(frozen=True)
class ProcessChoice:
    """A row of the registry for a number that MLX reads once, so that each needs a process."""

    name: str  # for people
    #: Takes what times a number in a process of its own, and the one that serves now.
    search: Callable[[Measure[int], int], Found[int]]
    time: Callable[[Stopwatch], Timing]  # within such a process
    usual: int  # MLX's own number
