# SPDX-License-Identifier: Apache-2.0
"""Estimates one tensor-parallel rank without the others or a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from vllm_metal.patches.mlx_patches.replacing import replaced


@dataclass(frozen=True)
class SimulatedGroup:
    """Simulates a group of `ranks` ranks, of which this process is the first."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


@dataclass(frozen=True)
class _Forward:
    """Replaces `mx.custom_function` where nothing is trained."""

    call: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def vjp(self, _: Any) -> _Forward:
        return self


@contextmanager
def alone(ranks: int) -> Iterator[SimulatedGroup]:
    """Replaces collectives by local operations of equal size in the block; results are wrong."""

    def all_sum(x: mx.array, **_: Any) -> mx.array:
        return x * 1

    def all_gather(x: mx.array, **_: Any) -> mx.array:
        return mx.concatenate([x] * ranks)

    with ExitStack() as stack:
        # MLX's layers mark where training would sum gradients; graphs with such marks cannot be
        # recorded.
        stack.enter_context(replaced(mx, "custom_function", _Forward))
        for function in (all_sum, all_gather):
            stack.enter_context(replaced(mx.distributed, function.__name__, function))
        yield SimulatedGroup(ranks)
