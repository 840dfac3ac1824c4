# SPDX-License-Identifier: Apache-2.0
"""Adds updates to the outputs of one model's linear layers and expert projections."""

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
    """Input and output sizes of a linear layer, and its number of experts."""

    num_in: int  # elements per input row
    num_out: int  # elements per output row
    num_experts: int | None = None  # None: a single matrix


@dataclass(frozen=True)
class Expert:
    """The expert of each row in a call."""

    indices: mx.array  # [..., k] for rows [...], or [T * k] if sorted by expert
    #: [T * k] int, source row of each if sorted.
    rows: mx.array | None


def sizes(module: nn.Module) -> Sizes | None:
    """Returns a layer's sizes; None if it cannot be adapted."""
    if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
        return Sizes(module.input_dims, module.output_dims, module.num_experts)
    if isinstance(module, nn.QuantizedLinear):
        return Sizes(module.scales.shape[-1] * module.group_size, module.weight.shape[0])
    if isinstance(module, nn.Linear):
        return Sizes(module.weight.shape[1], module.weight.shape[0])
    return None


def adapt(module: nn.Module, update: Callable[[mx.array, Expert | None], mx.array | None]) -> None:
    """Adds `update` to a layer's output, by giving the module a class of its own.

    update: maps the layer's input, and its experts if any, to an array to add, or None.
    """
    family = type(module)
    if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
        replace(switch_layers, "_gather_sort", _record_order)

    def call(self: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        computed: mx.array = family.__call__(self, x, *args, **kwargs)
        added = update(x, _expert(*args) if args else None)
        return computed if added is None else computed + added

    module.__class__ = type(family.__name__, (family,), {"__call__": call})


@dataclass(frozen=True)
class _Sorted:
    indices: mx.array  # [T * k], as passed to the projections
    rows: mx.array  # [T * k], source row of each


_newest: list[_Sorted] = []  # one at most


def _record_order(
    sort: Callable[..., tuple[mx.array, mx.array, mx.array]], x: mx.array, indices: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    found = sort(x, indices)
    _, sorted_indices, inverse = found
    # mlx-lm sorts rows by expert before it calls the projections, but does not pass them the order.
    # Compute it once for all projections of a layer.
    _newest[:] = [_Sorted(sorted_indices, mx.argsort(inverse) // indices.shape[-1])]
    return found


def _expert(indices: mx.array, *_: Any) -> Expert:
    if not _newest or _newest[0].indices is not indices:
        return Expert(indices, None)
    return Expert(indices, _newest[0].rows)
