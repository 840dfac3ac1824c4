# SPDX-License-Identifier: Apache-2.0
"""What goes from token to token in a known module: its operations, read off a call that is built.

They name what our kernels are checked for, and what they are compiled for before the first step;
and they are repeated where a step has no rows, but drafts of an earlier one to be applied.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx.utils import tree_map

from metal_kernels.selfcheck import StateKind
from metal_kernels.sequences import RecurrenceInputs
from vllm_metal.engine.recurrent.recurrent_state import StateFormat
from vllm_metal.patches.mlx_patches.recurrences import SequenceCall, handed_to

if TYPE_CHECKING:
    from vllm_metal.patches.mlx_patches.module_calls import ModuleCall

#: By axes of a recurrence's decays, what `StateKind` calls them; 0: there are none.
_DECAYS = {0: "rates", 2: "heads", 3: "keys"}


@dataclass(frozen=True)
class Convolution:
    """A convolution of [T, channels] inputs by [channels, taps] weights."""

    channels: int
    taps: int
    dtype: mx.Dtype  # of inputs
    weights: mx.Dtype
    bias: mx.Dtype | None

    def repeat(self, call: SequenceCall, num_rows: int) -> mx.array:
        """The operation over rows of zeros."""
        bias = None if self.bias is None else mx.zeros(self.channels, self.bias)
        weights = mx.zeros((self.channels, self.taps), self.weights)
        return call.convolve(mx.zeros((num_rows, self.channels), self.dtype), weights, bias)


@dataclass(frozen=True)
class Recurrence:
    """A recurrence of `RecurrenceInputs`."""

    heads: tuple[int, int, int, int]  # HK, DK, HV, DV
    dtype: mx.Dtype  # of queries and keys
    values: mx.Dtype
    decays: int  # axes: 2 by head, 3 by key; 0: they follow from the rates
    delta: bool  # by the delta rule
    #: [HV, DK] float32, A where decays follow from the rates; None: zeros.
    log_rates: mx.array | None = field(default=None, compare=False)

    def repeat(self, call: SequenceCall, num_rows: int) -> mx.array:
        """The operation over rows of zeros."""
        num_keys, key_size, num_heads, value_size = self.heads
        rows = mx.zeros((num_rows, num_keys, key_size), self.dtype)
        by_key = (num_heads, key_size)
        inputs = RecurrenceInputs(
            rows,
            mx.zeros((num_rows, num_heads, value_size), self.values),
            mx.zeros((num_rows, num_heads)),
            mx.zeros((num_rows, *by_key[: self.decays - 1])) if self.decays else None,
        )
        log_rates = self.log_rates
        if log_rates is None and not self.decays:
            log_rates = mx.zeros(by_key)
        return call.recur(rows, inputs, self.delta, log_rates)


@dataclass(frozen=True)
class Inside:
    """The operations of a module: its convolutions, then its recurrence if it has one."""

    convolutions: tuple[Convolution, ...] = ()
    recurrence: Recurrence | None = None

    def repeat(self, call: SequenceCall, num_rows: int = 1) -> None:
        """Has a call compute them all, over rows of zeros."""
        for operation in (*self.convolutions, self.recurrence):
            if operation is not None:
                operation.repeat(call, num_rows)

    def kinds(self, form: StateFormat) -> list[tuple[mx.Dtype, StateKind]]:
        """Kinds of states for the self-check, each with the dtype of rows.

        The recurrence lies behind the first convolution.

        Args:
            form: of the module's states.
        """
        kinds = [
            (each.dtype, StateKind(channels=each.channels, taps=each.taps))
            for each in self.convolutions
        ]
        if self.recurrence is not None:
            found = self.recurrence
            with_first = replace(
                kinds[0][1] if kinds else StateKind(),
                heads=found.heads,
                delta=found.delta,
                decays=_DECAYS[found.decays],
                dtype=form.dtypes[len(self.convolutions)],
            )
            kinds[:1] = [(found.values, with_first)]
        return kinds


def inside_of(call: ModuleCall, cache: object, form: StateFormat) -> Inside:
    """Reads what a known module leaves to its cache, by building a call of it.

    Args:
        call: of the module, as it was made.
        cache: the argument of it that stands for the state.
        form: of the state.
    """
    noted = _Noted(form)
    args, options = tree_map(
        lambda leaf: noted if leaf is cache else leaf, (list(call.args), call.options)
    )
    with handed_to(noted):
        call.module(*args, **options)
    return noted.inside


class _Noted(SequenceCall):
    """Notes the operations of a module."""

    def __init__(self, form: StateFormat) -> None:
        super().__init__(form.shapes, form.dtypes)
        self.inside = Inside()

    def convolve(self, inputs: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        channels, taps = weight.shape
        found = Convolution(
            channels, taps, inputs.dtype, weight.dtype, None if bias is None else bias.dtype
        )
        self.inside = replace(self.inside, convolutions=(*self.inside.convolutions, found))
        return inputs

    def recur(
        self,
        queries: mx.array,
        inputs: RecurrenceInputs,
        delta: bool,
        log_rates: mx.array | None = None,
    ) -> mx.array:
        (num_keys, key_size), (num_heads, value_size) = (
            inputs.keys.shape[1:],
            inputs.values.shape[1:],
        )
        found = Recurrence(
            (num_keys, key_size, num_heads, value_size),
            queries.dtype,
            inputs.values.dtype,
            0 if inputs.decays is None else inputs.decays.ndim,
            delta,
            log_rates,
        )
        self.inside = replace(self.inside, recurrence=found)
        return inputs.values
