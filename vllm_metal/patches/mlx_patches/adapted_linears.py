# SPDX-License-Identifier: Apache-2.0
"""Linear layers of one model, and experts' projections, to whose outputs updates are added."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import switch_layers
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from vllm_metal.patches.vllm_patches.replacing import replace

RELEASES = ("mlx 0.32", "mlx-lm 0.32")


@dataclass(frozen=True)
class Sizes:
    """What a layer multiplies with."""

    num_in: int  # elements of a row that goes in
    num_out: int  # of one that comes out
    num_experts: int | None = None  # None: it has one matrix


@dataclass(frozen=True)
class Expert:
    """Which expert each row of a call goes to."""

    indices: mx.array  # [..., k] of rows [...], or [T * k] where they were sorted by expert
    #: [T * k] int, where they were sorted: the row that each comes from, of T.
    rows: mx.array | None


def sizes(module: nn.Module) -> Sizes | None:
    """What a layer multiplies with; None: it is none of those that can be adapted."""
    if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
        return Sizes(module.input_dims, module.output_dims, module.num_experts)
    if isinstance(module, nn.QuantizedLinear):
        return Sizes(module.scales.shape[-1] * module.group_size, module.weight.shape[0])
    if isinstance(module, nn.Linear):
        return Sizes(module.weight.shape[1], module.weight.shape[0])
    return None


def adapt(module: nn.Module, update: Callable[[mx.array, Expert | None], mx.array | None]) -> None:
    """Adds to what a layer returns.

    The module gets a class of its own.

    Args:
        module: of which `sizes` knows.
        update: from the layer's input, and its experts if it has any, to what is added; None:
            nothing is.
    """
    family = type(module)
    if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
        replace(switch_layers, "_gather_sort", _noting_order)

    def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        computed: mx.array = family.__call__(self, x, *args, **kwargs)
        added = update(x, _expert(*args) if args else None)
        return computed if added is None else computed + added

    module.__class__ = type(family.__name__, (family,), {"__call__": call})


@dataclass(frozen=True)
class _Sorted:
    indices: mx.array  # [T * k], as they are handed to the projections
    rows: mx.array  # [T * k], the row that each comes from


_newest: list[_Sorted] = []  # one at most


def _noting_order(
    sort: Callable[..., tuple[mx.array, mx.array, mx.array]], x: mx.array, indices: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """mlx-lm sorts rows by expert before it calls the projections, which are not told the order."""
    found = sort(x, indices)
    _, sorted_indices, inverse = found
    # Once for all projections of a layer.
    _newest[:] = [_Sorted(sorted_indices, mx.argsort(inverse) // indices.shape[-1])]
    return found


def _expert(indices: mx.array, *_: Any) -> Expert:
    if not _newest or _newest[0].indices is not indices:
        return Expert(indices, None)
    return Expert(indices, _newest[0].rows)
