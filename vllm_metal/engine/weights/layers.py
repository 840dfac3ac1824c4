# SPDX-License-Identifier: Apache-2.0
"""Defines quantized layers with an output scale or input order; dequantizes rows of weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import QuantizedAllToShardedLinear, QuantizedShardedToAllLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

#: Endings of parameters that stay float32 in a model of any dtype.
FLOAT32 = (".output_scale", ".global_scale")


class ScaledLinear(nn.QuantizedLinear):
    """A quantized linear layer with `output_scale` ([out] float32), `input_order` ([in] int32)."""

    def __call__(self, x: mx.array) -> mx.array:
        """Maps [..., in] to [..., out]."""
        product = _product(self, x)
        return product + self["bias"] if "bias" in self else product


class ScaledAllToShardedLinear(QuantizedAllToShardedLinear):
    """A ScaledLinear of which each rank has some rows."""

    def __call__(self, x: mx.array) -> mx.array:
        """Maps [..., in] to [..., out / ranks]."""
        product = _product(self, x)
        return product + self["bias"] if "bias" in self else product


class ScaledShardedToAllLinear(QuantizedShardedToAllLinear):
    """A ScaledLinear of which each rank has some columns; sums the results over ranks."""

    def __call__(self, x: mx.array) -> mx.array:
        """Maps [..., in / ranks] to [..., out]."""
        product = mx.distributed.all_sum(_product(self, x), group=self.group)
        return product + self["bias"] if "bias" in self else product


class ScaledSwitchLinear(QuantizedSwitchLinear):
    """Experts' quantized projections with `output_scale` ([E, out] float32)."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Maps [..., 1, in] to [..., 1, out] with the experts that `indices` selects."""
        product = mx.gather_qmm(
            _in_range(self, x),
            self["weight"],
            self["scales"],
            self.get("biases"),
            rhs_indices=indices,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            sorted_indices=sorted_indices,
        )
        scale = mx.expand_dims(self["output_scale"][indices], -2)
        product = (product * scale).astype(x.dtype)
        if "bias" in self:
            product = product + mx.expand_dims(self["bias"][indices], -2)
        return product


def _product(layer: Any, x: mx.array) -> mx.array:
    """Computes a linear layer's product in the input's dtype, without the bias."""
    if "input_order" in layer:
        x = mx.take(x, layer["input_order"], axis=-1)
    product = mx.quantized_matmul(
        _in_range(layer, x),
        layer["weight"],
        scales=layer["scales"],
        biases=layer.get("biases"),
        transpose=True,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    )
    if "output_scale" in layer:
        product = product * layer["output_scale"]
    return product.astype(x.dtype)


def _in_range(layer: Any, x: mx.array) -> mx.array:
    # Products must stay in the dtype's range: NVFP4 values go up to 2688.
    wide = layer.mode == "nvfp4" and x.dtype == mx.float16
    return x.astype(mx.float32) if wide else x


def can_scale(module: nn.Module) -> bool:
    """Whether a layer supports an output scale when it is quantized."""
    return isinstance(module, nn.Linear | SwitchLinear)


def can_reorder(module: nn.Module) -> bool:
    """Whether a layer supports an input order when it is quantized."""
    return isinstance(module, nn.Linear)


def make_scaled(module: nn.Module) -> None:
    """Turns a quantized layer into one that reads `output_scale` and `input_order`."""
    module.__class__ = next(
        scaled for plain, scaled in _SCALED.items() if isinstance(module, plain)
    )


def make_plain(module: nn.Module) -> None:
    """Reverts `make_scaled`."""
    module.__class__ = next(
        plain for plain, scaled in _SCALED.items() if isinstance(module, scaled)
    )


def is_scaled(module: nn.Module) -> bool:
    """Whether `make_scaled` was applied to a layer."""
    return isinstance(module, tuple(_SCALED.values()))


#: Maps MLX's quantized layers to their counterparts here.
_SCALED: Mapping[type[nn.Module], type[nn.Module]] = {
    nn.QuantizedLinear: ScaledLinear,
    QuantizedSwitchLinear: ScaledSwitchLinear,
    QuantizedAllToShardedLinear: ScaledAllToShardedLinear,
    QuantizedShardedToAllLinear: ScaledShardedToAllLinear,
}


def dense_rows(module: Any, rows: mx.array | slice = slice(None)) -> mx.array:
    """Returns lazy float32 rows of a linear layer's or embedding's weight, quantized or not."""
    weight = cast(mx.array, module.weight[rows])
    if not hasattr(module, "bits"):
        return weight.astype(mx.float32)
    biases = module.get("biases")
    dense = mx.dequantize(
        weight,
        module.scales[rows],
        None if biases is None else biases[rows],
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    ).astype(mx.float32)
    if "output_scale" in module:
        dense = dense * module.output_scale[rows][..., None]
    if "input_order" in module:
        dense = mx.take(dense, mx.argsort(module.input_order), axis=-1)
    return dense
