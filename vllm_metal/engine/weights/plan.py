# SPDX-License-Identifier: Apache-2.0
"""Plan: how each weight of a checkpoint is stored, decided before weights are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import mlx.core as mx

from vllm_metal.engine.weights.packed import Weight
from vllm_metal.identity.model_files import ModelLoadError

Arrays = Mapping[str, mx.array]


@dataclass(frozen=True)
class StoredWeight:
    """A weight whose stored form is not MLX's, with the function that converts it."""

    #: The weight's name in an unquantized checkpoint, such as "model.layers.0.mlp.up_proj.weight"
    #: or "model.layers.0.mlp.experts.gate_up_proj".
    name: str
    format: str  # for messages, such as "FP8"
    tensors: Mapping[str, str]  # names of stored tensors by part, such as "scales"
    #: Converts stored arrays by part, for activations of a dtype. Lazy, but may evaluate small
    #: arrays. Raises ModelLoadError, without the weight's name, if shapes do not fit.
    convert: Callable[[Arrays, mx.Dtype], Weight]
    #: Whether the unquantized weight is [E, in, out]; `convert` returns [E, out, in] even so.
    transposed: bool = False

    def converted(self, arrays: Arrays, dtype: mx.Dtype) -> Weight:
        """Converts the weight from the checkpoint's arrays by name.

        Raises ModelLoadError: arrays do not fit each other; the message names the weight.
        """
        try:
            return self.convert({part: arrays[name] for part, name in self.tensors.items()}, dtype)
        except ModelLoadError as error:
            raise ModelLoadError(
                f"{self.name} ({self.format}) {error}. Download the checkpoint again"
            ) from error


@dataclass(frozen=True)
class Plan:
    """A plan to read a checkpoint: weights to convert, and tensors that are not used."""

    weights: Mapping[str, StoredWeight] = field(default_factory=dict)  # by name
    #: Tensors that are not used, such as scales of activations, with the reason.
    unused: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # lines for the log

    def converted(self, arrays: Arrays, dtype: mx.Dtype) -> dict[str, Weight]:
        """Converts stored arrays to weights, named as in an unquantized checkpoint; lazy.

        Skips weights of which an array is missing.

        Raises ModelLoadError: see `StoredWeight.converted`.
        """
        taken = {tensor for weight in self.weights.values() for tensor in weight.tensors.values()}
        found: dict[str, Weight] = {
            name: array
            for name, array in arrays.items()
            if name not in taken and name not in self.unused
        }
        for name, weight in self.weights.items():
            if all(tensor in arrays for tensor in weight.tensors.values()):
                found[name] = weight.converted(arrays, dtype)
        return found
