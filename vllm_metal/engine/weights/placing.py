# SPDX-License-Identifier: Apache-2.0
"""Puts weights into a model of mlx-lm, under its names and in its shapes.

A family's `sanitize` expects an unquantized checkpoint: it renames, stacks, splits and joins
weights by rows. For packed weights it is called once with all quantized values under the weights'
names, once with all scales, and so on. A weight whose rows it changes is dequantized first.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from vllm_metal.engine.weights.layers import can_reorder, can_scale, make_scaled
from vllm_metal.engine.weights.packed import Packed, Weight, requantized
from vllm_metal.engine.weights.plan import StoredWeight

_QUANTIZED, _SCALES, _BIASES, _OUTPUT_SCALE, _ORDER, _ONES = (
    *("weight", "scales", "biases", "output_scale"),
    *("input_order", "ones"),
)
_EXPERT = re.compile(r"\.experts\.\d+\.")
#: Mode by bits and group size, for modes with byte scales.
MODES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
_MAX_ATTEMPTS = 8
#: The text model's place in modules of mlx-vlm, which checkpoints of text models do not name.
_TEXT = "language_model."


@dataclass(frozen=True)
class Placed:
    """Arrays by a model's parameter names, and the packing of its quantized layers."""

    arrays: dict[str, mx.array]
    packings: dict[str, dict[str, Any]]  # by path: group_size, bits, mode


def place(
    model: nn.Module,
    weights: Mapping[str, Weight],
    stored: Mapping[str, StoredWeight],
    dtype: mx.Dtype,
    sanitize: Callable[[Any, dict[str, mx.array]], Mapping[str, mx.array]] | None = None,
) -> Placed:
    """Maps weights from a checkpoint's names to a model's; lazy.

    Args:
        model: a model without weights; its `sanitize` may change it.
        weights: weights by name, see `Plan.converted`.
        stored: weights whose stored form is not MLX's, by name.
        dtype: dtype of activations.
        sanitize: replaces the model's own; takes the model or a copy, and arrays by the names of
            `weights`.
    """
    weights = _unify_experts(dict(weights), dtype)
    transposed = {name for name, each in stored.items() if each.transposed}
    run = _Sanitize(model, transposed, sanitize or _model_sanitize)
    if not any(isinstance(weight, Packed) for weight in weights.values()):
        return Placed(run.final(weights, _QUANTIZED), {})
    for _ in range(_MAX_ATTEMPTS):  # each one makes more weights dense
        try:
            parts = {part: run.tried(weights, part) for part in _parts(weights)}
        except (ValueError, TypeError, IndexError):
            unplaceable = _minority_packings(weights)
            if not unplaceable:
                raise
        else:
            packings = _packings(model, weights, parts)
            unplaceable = _sources(weights, packings, parts[_QUANTIZED])
            if not unplaceable:
                return _assemble(run, weights, parts, packings)
        for name in unplaceable:
            weights[name] = cast(Packed, weights[name]).dense(dtype)
    raise ValueError("cannot map quantized weights to the model's names")


def install(model: nn.Module, placed: Placed) -> None:
    """Quantizes the layers of packed weights and loads all arrays.

    Raises ValueError: a parameter has no array, an array no parameter, or integers would be loaded
    as floating-point values.
    """
    nn.quantize(
        model,
        class_predicate=lambda path, module: placed.packings.get(path, False),
    )
    for path, module in model.named_modules():
        if {f"{path}.{_OUTPUT_SCALE}", f"{path}.{_ORDER}"} & placed.arrays.keys():
            make_scaled(module)
            for name in (_OUTPUT_SCALE, _ORDER):
                if f"{path}.{name}" in placed.arrays:
                    module[name] = placed.arrays[f"{path}.{name}"]
            module.freeze()
    arrays = _without_empty_biases(model, placed)
    _check_kinds(model, arrays)
    model.load_weights(list(arrays.items()), strict=True)


def _check_kinds(model: nn.Module, arrays: Mapping[str, mx.array]) -> None:
    # MLX assigns arrays of any dtype: codes of a quantized weight would be taken for its values.
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    for name, parameter in parameters:
        array = arrays.get(name)
        if array is None or mx.issubdtype(array.dtype, mx.floating):
            continue
        if mx.issubdtype(parameter.dtype, mx.floating):
            raise ValueError(
                f"{name} is stored as {_name(array.dtype)}, but is no quantized weight of a "
                "supported format. Choose another checkpoint of the model"
            )


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def _without_empty_biases(model: nn.Module, placed: Placed) -> dict[str, mx.array]:
    # Quantizers write biases of zeros for layers that have none, and so does Jina VLM's own code.
    empty = [
        name
        for path, layer in model.named_modules()
        if (path in placed.packings or isinstance(layer, nn.Linear)) and "bias" not in layer
        if (name := f"{path}.bias") in placed.arrays and not mx.any(placed.arrays[name]).item()
    ]
    return {name: array for name, array in placed.arrays.items() if name not in empty}


class _Sanitize:
    """Calls a family's `sanitize` with the same part (such as the scales) of all weights."""

    def __init__(
        self,
        model: nn.Module,
        transposed: set[str],
        sanitize: Callable[[Any, dict[str, mx.array]], Mapping[str, mx.array]],
    ) -> None:
        self._model = model
        self._transposed = transposed
        self._sanitize = sanitize

    def tried(self, weights: Mapping[str, Weight], part: str) -> dict[str, mx.array]:
        """Runs `sanitize` on a copy of the model."""
        return self._run(copy_modules(self._model), weights, part)

    def final(self, weights: Mapping[str, Weight], part: str) -> dict[str, mx.array]:
        """Runs `sanitize` on the model itself, which it may change."""
        return self._run(self._model, weights, part)

    def _run(self, model: Any, weights: Mapping[str, Weight], part: str) -> dict[str, mx.array]:
        given = {
            name: _part(weight, part, name in self._transposed, index)
            for index, (name, weight) in enumerate(weights.items())
        }
        return dict(self._sanitize(model, given))


def copy_modules(node: Any) -> Any:
    """Copies modules but not arrays: a `sanitize` may remove modules."""
    if isinstance(node, nn.Module):
        module = copy.copy(node)
        for name, child in node.items():
            dict.__setitem__(module, name, copy_modules(child))
        return module
    if isinstance(node, dict):
        return {name: copy_modules(child) for name, child in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(copy_modules(child) for child in node)
    return node


def _model_sanitize(model: Any, weights: dict[str, mx.array]) -> Mapping[str, mx.array]:
    found: Mapping[str, mx.array] = weights
    if hasattr(model, "sanitize"):
        found = model.sanitize(weights)
    return found


def _part(weight: Weight, part: str, transposed: bool, index: int) -> mx.array:
    """Returns a part (values, scales, ...) of a packed weight, [..., out, n]; a dense one whole.

    For a part that the weight lacks, returns a uint8 column of ones, which can be joined to others.

    transposed: swap the last two axes. index: number of the weight's input order, for that part.
    """
    if isinstance(weight, mx.array):
        found = weight.swapaxes(-1, -2) if transposed else weight
        return found.reshape(found.shape)  # a new object: families compute in place
    rows = weight.quantized.shape[:-1]
    if part == _ONES:
        found = mx.broadcast_to(mx.array(1.0), (*rows, 1))
    elif part == _QUANTIZED:
        found = weight.quantized
    elif part == _SCALES:
        found = weight.scales
    elif part == _BIASES and weight.biases is not None:
        found = weight.biases
    elif part == _OUTPUT_SCALE and weight.output_scale is not None:
        found = weight.output_scale[..., None]
    elif part == _ORDER and weight.input_order is not None:
        found = mx.full((*rows, 1), index, mx.int32)
    else:
        found = mx.broadcast_to(mx.array(1, mx.uint8), (*rows, 1))
    found = found.swapaxes(-1, -2) if transposed else found
    return found.reshape(found.shape)


def _unify_experts(weights: dict[str, Weight], dtype: mx.Dtype) -> dict[str, Weight]:
    """Gives the experts of a layer one packing, because they are stacked."""
    experts: dict[str, list[str]] = {}
    for name, weight in weights.items():
        if isinstance(weight, Packed) and _EXPERT.search(name):
            experts.setdefault(_EXPERT.sub(".experts.*.", name), []).append(name)
    for names in experts.values():
        packed = [cast(Packed, weights[name]) for name in names]
        if len({_key(each) for each in packed}) > 1 or packed[0].input_order is not None:
            for name, each in zip(names, packed, strict=True):
                weights[name] = requantized(each.dense(mx.float32), dtype)
    return weights


def _key(weight: Packed) -> tuple[Any, ...]:
    has = (weight.output_scale is not None, weight.input_order is not None)
    return (weight.mode, weight.bits, weight.group_size, *has)


def _minority_packings(weights: Mapping[str, Weight]) -> list[str]:
    """Lists packed weights whose packing is not the most frequent one."""
    keys = {name: _key(each) for name, each in weights.items() if isinstance(each, Packed)}
    if not keys:
        return []
    ((most, _),) = Counter(keys.values()).most_common(1)
    return [name for name, key in keys.items() if key != most] or list(keys)


def _parts(weights: Mapping[str, Weight]) -> list[str]:
    """Lists the parts that at least one of the weights has."""
    packed = [each for each in weights.values() if isinstance(each, Packed)]
    present = {
        _SCALES: bool(packed),
        _ONES: bool(packed),
        _BIASES: any(each.biases is not None for each in packed),
        _OUTPUT_SCALE: any(each.output_scale is not None for each in packed),
        _ORDER: any(each.input_order is not None for each in packed),
    }
    return [_QUANTIZED, *(part for part, has in present.items() if has)]


Parts = Mapping[str, Mapping[str, mx.array]]


def _packings(
    model: nn.Module, weights: Mapping[str, Weight], parts: Parts
) -> dict[str, dict[str, Any] | None]:
    """Returns the packing of each output of `sanitize`, by path.

    None: `sanitize` changed rows of the weight, or the layer does not support a packed weight.
    """
    if _SCALES not in parts:
        return {}
    modules = dict(model.named_modules())
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    shapes = {name: array.shape for name, array in parameters}
    found: dict[str, dict[str, Any] | None] = {}
    for name, array in parts[_QUANTIZED].items():
        shape = shapes.get(name)
        if shape is None:
            continue  # not in the model: loading reports it
        path = name.removesuffix(".weight")
        if array.dtype == mx.uint32:
            found[path] = _packing(modules.get(path), shape, name, parts)
        elif array.shape != shape or isinstance(weights.get(name), Packed):
            found[path] = None
    # The part of ones shows whether rows were multiplied or added to.
    kept = {path: (parts[_ONES][f"{path}.weight"] == 1).all() for path in found if found[path]}
    mx.eval(list(kept.values()))
    return {path: packing if kept.get(path) else None for path, packing in found.items()}


def _packing(module: Any, shape: tuple[int, ...], name: str, parts: Parts) -> dict[str, Any] | None:
    quantized, scales = parts[_QUANTIZED][name], parts[_SCALES].get(name)
    if scales is None or not hasattr(module, "to_quantized"):
        return None
    rows, num_in = shape[:-1], shape[-1]
    ones = parts[_ONES].get(name)
    if ones is None or {quantized.shape[:-1], scales.shape[:-1], ones.shape[:-1]} != {rows}:
        return None
    if num_in % scales.shape[-1]:
        return None
    if _extra(_OUTPUT_SCALE, name, parts) is not None and not can_scale(module):
        return None
    order = _extra(_ORDER, name, parts)
    if order is not None and not (can_reorder(module) and (order == order.reshape(-1)[0]).all()):
        return None
    bits, left = divmod(quantized.shape[-1] * 32, num_in)
    group_size = num_in // scales.shape[-1]
    mode = MODES.get((bits, group_size)) if scales.dtype == mx.uint8 else "affine"
    if left or mode is None:
        return None
    return {"group_size": group_size, "bits": bits, "mode": mode}


def _extra(part: str, name: str, parts: Parts) -> mx.array | None:
    array = parts.get(part, {}).get(name)
    return None if array is None or array.dtype == mx.uint8 else array


def _sources(
    weights: Mapping[str, Weight],
    packings: Mapping[str, dict[str, Any] | None],
    quantized: Mapping[str, mx.array],
) -> list[str]:
    """Lists packed weights that have to be dequantized: their outputs have no packing."""
    packed = {
        name.removeprefix(_TEXT): name for name, each in weights.items() if isinstance(each, Packed)
    }
    outputs = {name.removeprefix(_TEXT) for name in quantized}
    found: set[str] = set()
    for path, packing in packings.items():
        if packing is not None:
            continue
        parent = path.removeprefix(_TEXT)
        name = f"{parent}.weight" if f"{parent}.weight" in outputs else parent
        if name in packed:
            found.add(packed[name])
            continue
        while parent:
            parent = parent.rpartition(".")[0]
            # Weights that are no longer among the outputs went into others.
            beside = [n for n in packed if n not in outputs and n.startswith(f"{parent}.")]
            if beside:
                found.update(packed[n] for n in beside)
                break
        else:
            found.update(packed.values())
    return sorted(found)


def _assemble(
    run: _Sanitize,
    weights: Mapping[str, Weight],
    parts: Parts,
    packings: Mapping[str, dict[str, Any] | None],
) -> Placed:
    arrays = run.final(weights, _QUANTIZED)  # on the model itself, after all trials on copies
    by_index = list(weights.values())
    for path, packing in packings.items():
        assert packing is not None
        name = f"{path}.weight"
        arrays[f"{path}.{_SCALES}"] = parts[_SCALES][name]
        if packing["mode"] == "affine":
            arrays[f"{path}.{_BIASES}"] = parts[_BIASES][name]
        if (scale := _extra(_OUTPUT_SCALE, name, parts)) is not None:
            arrays[f"{path}.{_OUTPUT_SCALE}"] = scale[..., 0]
        if (order := _extra(_ORDER, name, parts)) is not None:
            source = by_index[int(cast(int, order.reshape(-1)[0].item()))]
            assert isinstance(source, Packed) and source.input_order is not None
            arrays[f"{path}.{_ORDER}"] = source.input_order
    return Placed(arrays, {path: each for path, each in packings.items() if each is not None})
