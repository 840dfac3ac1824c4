# SPDX-License-Identifier: Apache-2.0
"""The recurrent operations of a known module, recorded by tracing a call of it.

They determine which kernels are checked and compiled at startup. They are also repeated in a step
without tokens, which only applies accepted drafts of an earlier step.
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

#: `StateKind.decays` by number of axes of the decays; 0: there are none.
_DECAYS = {0: "rates", 2: "heads", 3: "keys"}


@dataclass(frozen=True)
class Convolution:
    """A convolution of [T, channels] inputs by [channels, taps] weights."""

    channels: int
    taps: int
    dtype: mx.Dtype  # dtype of inputs
    weights: mx.Dtype
    bias: mx.Dtype | None

    def repeat(self, call: SequenceCall, num_rows: int) -> mx.array:
        """Runs the operation in `call` on `num_rows` rows of zeros, and returns its output."""
        bias = None if self.bias is None else mx.zeros(self.channels, self.bias)
        weights = mx.zeros((self.channels, self.taps), self.weights)
        return call.convolve(mx.zeros((num_rows, self.channels), self.dtype), weights, bias)


@dataclass(frozen=True)
class Recurrence:
    """A recurrence over tokens, with inputs as in `RecurrenceInputs`."""

    heads: tuple[int, int, int, int]  # HK, DK, HV, DV
    dtype: mx.Dtype  # dtype of queries and keys
    values: mx.Dtype
    decays: int  # axes: 2 for one per head, 3 for one per key; 0: computed from the rates
    delta: bool  # whether the delta rule applies
    #: [HV, DK] float32, log of A if decays are computed from the rates; None: zeros.
    log_rates: mx.array | None = field(default=None, compare=False)

    def repeat(self, call: SequenceCall, num_rows: int) -> mx.array:
        """Runs the operation in `call` on `num_rows` rows of zeros, and returns its output."""
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
class RecurrentOps:
    """The recurrent operations of a module: convolutions, then at most one recurrence."""

    convolutions: tuple[Convolution, ...] = ()
    recurrence: Recurrence | None = None

    def repeat(self, call: SequenceCall, num_rows: int = 1) -> None:
        """Runs all operations of `call` on zeros."""
        for operation in (*self.convolutions, self.recurrence):
            if operation is not None:
                operation.repeat(call, num_rows)

    def kinds(self, form: StateFormat) -> list[tuple[mx.Dtype, StateKind]]:
        """Returns kinds of states for the self-check, each with the dtype of its inputs.

        The recurrence's state is checked together with the first convolution's.
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


def traced_ops(call: ModuleCall, cache: object, form: StateFormat) -> RecurrentOps:
    """Records the recurrent operations of a known module by tracing a call of it.

    Args:
        call: a recorded call of the module.
        cache: the argument of the call that is the layer's cache.
        form: format of the layer's state.
    """
    recorder = _Recorder(form)
    args, options = tree_map(
        lambda leaf: recorder if leaf is cache else leaf, (list(call.args), call.options)
    )
    with handed_to(recorder):
        call.module(*args, **options)
    return recorder.ops


class _Recorder(SequenceCall):
    def __init__(self, form: StateFormat) -> None:
        super().__init__(form.shapes, form.dtypes)
        self.ops = RecurrentOps()

    def convolve(self, inputs: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        channels, taps = weight.shape
        found = Convolution(
            channels, taps, inputs.dtype, weight.dtype, None if bias is None else bias.dtype
        )
        self.ops = replace(self.ops, convolutions=(*self.ops.convolutions, found))
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
        self.ops = replace(self.ops, recurrence=found)
        return inputs.values
