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
    """One weight that is stored in another form than MLX has."""

    #: What the weight would be called in a checkpoint that is not quantized, such as
    #: "model.layers.0.mlp.up_proj.weight" or "model.layers.0.mlp.experts.gate_up_proj".
    name: str
    format: str  # for messages, such as "FP8"
    tensors: Mapping[str, str]  # names of stored tensors by their part, such as "scales"
    #: From the stored arrays by part, and the activations' dtype. Lazy; it may evaluate small
    #: arrays. Raises ModelLoadError where shapes do not fit, without the weight's name.
    convert: Callable[[Arrays, mx.Dtype], Weight]
    #: Whether the unquantized weight has inputs before outputs: [E, in, out]. `convert` returns
    #: [E, out, in] all the same.
    transposed: bool = False

    def converted(self, arrays: Arrays, dtype: mx.Dtype) -> Weight:
        """The weight of the checkpoint's arrays by name.

        Raises:
            ModelLoadError: arrays do not fit each other; the message names the weight.
        """
        try:
            return self.convert({part: arrays[name] for part, name in self.tensors.items()}, dtype)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self.name} ({self.format}) {error}") from error


@dataclass(frozen=True)
class Plan:
    """A checkpoint's weights; those it does not list are stored as they are."""

    weights: Mapping[str, StoredWeight] = field(default_factory=dict)  # by their names
    #: Tensors that take no part here, such as scales of activations, and why.
    unused: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # lines for the log

    def converted(self, arrays: Arrays, dtype: mx.Dtype) -> dict[str, Weight]:
        """Weights by the names of an unquantized checkpoint; lazy.

        Args:
            arrays: as stored, by name. Those of weights that are partly left out are, too.
            dtype: of activations.

        Raises:
            ModelLoadError: see `StoredWeight.converted`.
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
