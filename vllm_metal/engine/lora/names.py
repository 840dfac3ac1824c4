# SPDX-License-Identifier: Apache-2.0
"""Maps PEFT's module names to mlx-lm's modules through the model's own `sanitize`.

`sanitize` renames, stacks, splits and reorders a checkpoint's weights. Arrays that record each
element's origin take the same path, so that an update reaches the rows and columns it was
trained for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from vllm_metal.engine.lora.adapter import Adapter, LowRank
from vllm_metal.engine.lora.files import AdapterError

#: Names of an expert's projections in checkpoints with one module per expert.
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3"))
_EXPERT = re.compile(r"(.*\blayers\.)(\d+)(\..+\.experts\.)\d+\.(\w+)\.weight")
_LAYER = re.compile(r".*\blayers\.(\d+)\..+")
#: Prefix of a multimodal model's text model in transformers and in mlx-lm; checkpoints use either.
_HF_TEXT, _MLX_TEXT = "model.language_model.", "language_model.model."
_ALL, _GATE_UP, _DOWN = ".experts", ".experts.gate_up_proj", ".experts.down_proj"
#: float32 represents all integers up to here.
_MAX_INDEX = 2**24


#: Shape given to a weight that a model looks for and an adapter lacks: a convolution's shape as in
#: transformers' checkpoints, by which models recognize them.
_MISSING_SHAPE = (1, 1, 4)


class _Unmapped(Exception):
    """An update cannot be mapped to a module; the message says why."""


class _MissingKey(Exception):
    """mlx-lm's `sanitize` needs a weight that is missing; the message is its key."""


@dataclass(frozen=True)
class _Weights:
    """The part of a checkpoint's weights that concerns an adapter."""

    names: list[str]  # names of updates, by source index
    shapes: dict[str, tuple[int, ...]]  # by key: those of the updates in their order, then others
    transposed: bool  # whether matrices are [in, out]

    def arrays(self, values: str) -> dict[str, mx.array]:
        """Returns lazy arrays by key; elements are their "source", "row" or "column", or else 1."""
        return {
            key: self._array(values, index, shape)
            for index, (key, shape) in enumerate(self.shapes.items())
        }

    def _array(self, values: str, index: int, shape: tuple[int, ...]) -> mx.array:
        if values == "factor":
            array = mx.ones((1, 1))
        elif values == "source":
            array = mx.full((1, 1), float(index))
        elif values == "row":
            array = mx.arange(shape[-2], dtype=mx.float32)[:, None]
        else:
            array = mx.arange(shape[-1], dtype=mx.float32)[None]
        array = mx.broadcast_to(array, shape)
        return array.T if self.transposed and array.ndim == 2 else array


@dataclass(frozen=True)
class _Origin:
    """Origin of each element of a module's weight."""

    sources: np.ndarray  # [E] int, index of each expert's source weight; or [1]
    rows: np.ndarray  # [out] int
    columns: np.ndarray  # [in] int
    factors: np.ndarray  # [out] float32, by which the model's `sanitize` multiplies each row
    is_stacked: bool  # a stack of experts


def on_modules(adapter: Adapter, model: nn.Module) -> dict[str, LowRank]:
    """Maps an adapter's updates to modules of mlx-lm's model.

    Raises AdapterError: a name matches no module, or a module combines parts of several updates.
    """
    if not adapter.is_peft:
        return dict(adapter.updates)
    try:
        weights, origins = _resolve_origins(_weights(adapter, model), model)
    except _Unmapped as error:
        raise AdapterError(adapter.name, str(error)) from error
    updates = [adapter.updates[name] for name in weights.names]
    found = {module: _update(origin, updates) for module, origin in origins.items()}
    landed = {int(source) for origin in origins.values() for source in origin.sources}
    for index, name in enumerate(weights.names):
        if index not in landed:
            raise AdapterError(adapter.name, f"updates {name}, which the model does not have")
    return found


def _resolve_origins(weights: _Weights, model: nn.Module) -> tuple[_Weights, dict[str, _Origin]]:
    """Calls `_origins`, adding each weight that `sanitize` misses, until it misses none."""
    while True:
        try:
            return weights, _origins(weights, model)
        except _MissingKey as missing:
            weights = replace(weights, shapes=weights.shapes | {str(missing): _MISSING_SHAPE})


def switches(model: nn.Module) -> dict[str, Any]:
    """Returns the model's stacked projections of experts, by path."""
    linears = (SwitchLinear, QuantizedSwitchLinear)
    return {name: each for name, each in model.named_modules() if isinstance(each, linears)}


def _weights(adapter: Adapter, model: nn.Module) -> _Weights:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, update in adapter.updates.items():
        num_in, num_out = update.sizes
        if max(num_in, num_out) >= _MAX_INDEX:
            raise _Unmapped(f"updates {name}, which is too large")
        shapes[_key(name, update, model)] = (*update.a.shape[:-2], num_out, num_in)
    if len(shapes) < len(adapter.updates):
        raise _Unmapped("updates one array of experts twice")
    shapes = shapes | dict(_other_experts(shapes, model))
    return _Weights(list(adapter.updates), shapes, adapter.fan_in_fan_out)


def _key(name: str, update: LowRank, model: nn.Module) -> str:
    """Returns the name that a checkpoint gives the updated array."""
    # PEFT names experts in one array by their module alone: `experts`, and `experts.base_layer`
    # for a second array. The shape shows which array it is.
    if name.startswith(_HF_TEXT) and hasattr(getattr(model, "language_model", None), "model"):
        name = _MLX_TEXT + name.removeprefix(_HF_TEXT)
    if update.a.ndim == 2:
        return _published_key(f"{name}.weight", model)
    prefix = name.removesuffix(".base_layer").removesuffix(_ALL)
    for path, linear in switches(model).items():
        outer, inner = linear.input_dims, linear.output_dims
        if path.endswith("gate_proj") and update.sizes == (outer, 2 * inner):
            return prefix + _GATE_UP
        if path.endswith("down_proj") and update.sizes == (outer, inner):
            return prefix + _DOWN
    return f"{prefix}{_ALL}"


def _published_key(key: str, model: nn.Module) -> str:
    """Translates a key of transformers 5, which renames modules, to that of published files."""
    # Names that mlx-lm's model has, too, stay: transformers maps two names to one in places, which
    # its reverse mapping cannot tell apart (Kimi Linear's dense and sparse layers).
    if key.removesuffix(".weight") in dict(model.named_modules()):
        return key
    for renaming in _renamings(getattr(model, "model_type", "")):
        key, _ = renaming.rename_source_key(key)
    return key


@cache
def _renamings(model_type: str) -> tuple[WeightRenaming, ...]:
    """Returns transformers' rules that rename a family's modules to those of published files."""
    found = get_checkpoint_conversion_mapping(model_type) or ()
    return tuple(
        renaming.reverse_transform()
        for renaming in reversed(found)
        if type(renaming) is WeightRenaming
    )


def _other_experts(
    shapes: Mapping[str, tuple[int, ...]], model: nn.Module
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields experts without an update: mlx-lm's models expect all experts of a layer."""
    by_projection = {
        (match[1], match[3], match[4]): shape
        for key, shape in shapes.items()
        if (match := _EXPERT.fullmatch(key))
    }
    num_experts = max((each.num_experts for each in switches(model).values()), default=0)
    for before, after in {(before, after) for before, after, _ in by_projection}:
        for names in _PROJECTIONS:
            if not any((before, after, name) in by_projection for name in names):
                continue
            for layer in range(len(model.layers)):
                for name in names:
                    shape = by_projection.get((before, after, name), (1, 1))
                    for expert in range(num_experts):
                        key = f"{before}{layer}{after}{expert}.{name}.weight"
                        if key not in shapes:
                            yield key, shape


def _origins(weights: _Weights, model: nn.Module) -> dict[str, _Origin]:
    """Runs arrays that encode their origin through `sanitize`; returns updated modules' origins."""
    sources, rows, columns, factors = (
        _sanitize(model, weights.arrays(values)) for values in ("source", "row", "column", "factor")
    )
    found = {}
    for key, factor in factors.items():
        module = key.removesuffix(".weight")
        source, row, column = (_round(array[key] / factor) for array in (sources, rows, columns))
        if (source < len(weights.names)).any().item():
            found[module] = _origin(module, source, row, column, factor)
    return found


def _sanitize(model: nn.Module, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    given = set(arrays)
    if hasattr(model, "sanitize"):
        try:
            with _preserve(model):
                arrays = model.sanitize(arrays)
        except KeyError as error:  # raised by mlx-lm's code, which expects a whole checkpoint
            if not error.args or not isinstance(error.args[0], str) or error.args[0] in given:
                raise _Unmapped(f"has names that mlx-lm's model cannot rename ({error})") from error
            raise _MissingKey(error.args[0]) from error
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise _Unmapped(f"has names that mlx-lm's model cannot rename ({problem})") from error
    renamed: dict[str, mx.array] = {}
    for key, array in arrays.items():
        renamed |= _split_experts(key, array, model)
    return renamed


@contextmanager
def _preserve(model: nn.Module) -> Iterator[None]:
    """Restores the model at the end of the block, since `sanitize` may change it."""
    # Gemma's `sanitize` drops the head if the weights have none, and fails if it is gone already.
    text = getattr(model, "language_model", None)
    owners = [each for each in (model, text) if isinstance(each, nn.Module)]
    before = [(dict(owner), dict(vars(owner))) for owner in owners]
    for owner in owners:
        owner.setdefault("lm_head", {})
    try:
        yield
    finally:
        for owner, (children, attributes) in zip(owners, before, strict=True):
            owner.clear()
            dict.update(owner, children)  # a module has an `update` of its own
            vars(owner).clear()
            vars(owner).update(attributes)


def _split_experts(key: str, array: mx.array, model: nn.Module) -> dict[str, mx.array]:
    """Splits an array that stacks experts into mlx-lm's projections; keeps other arrays.

    transformers stores [E, 2 * inner, outer], gate before up, and [E, outer, inner].
    """
    if not key.endswith((_GATE_UP, _DOWN)):
        return {key: array}
    layer = _LAYER.fullmatch(key)
    paths = {
        path.rpartition(".")[2]: path
        for path in switches(model)
        if layer and (match := _LAYER.fullmatch(path)) and match[1] == layer[1]
    }
    if not {"gate_proj", "up_proj", "down_proj"} <= set(paths):
        return {key: array}
    if key.endswith(_DOWN):
        return {f"{paths['down_proj']}.weight": array}
    middle = array.shape[-2] // 2
    return {
        f"{paths['gate_proj']}.weight": array[..., :middle, :],
        f"{paths['up_proj']}.weight": array[..., middle:, :],
    }


def _round(array: mx.array) -> mx.array:
    """Rounds elements close to an integer: multiplying and dividing by a factor is inexact."""
    rounded = mx.round(array)
    return mx.where(mx.abs(array - rounded) < 1e-2, rounded, array)


def _origin(
    module: str, source: mx.array, row: mx.array, column: mx.array, factor: mx.array
) -> _Origin:
    """Derives a module's origin from that of each element, float32 [out, in] or [E, out, in]."""
    # Each expert has its own source; rows and columns are the same for all.
    edges = [source[..., 0, 0], source[..., -1, 0], source[..., 0, -1], source[..., -1, -1]]
    rows, columns = row[..., :, 0], column[..., 0, :]
    same = [mx.array_equal(edge, edges[0]) for edge in edges]
    same += [mx.array_equal(rows, row[..., :, -1]), mx.array_equal(columns, column[..., -1, :])]
    same += [mx.array_equal(factor[..., 0], factor[..., -1])]
    whole = [mx.array_equal(array, mx.round(array)) for array in (edges[0], rows, columns)]
    sources = np.atleast_1d(np.array(edges[0])).astype(int)
    if not all(each.item() for each in (*same, *whole)):
        raise _Unmapped(f"updates parts of {module}, which is a single module in mlx-lm's model")
    factors = np.array(factor[..., 0]).reshape(-1, factor.shape[-2])[0]
    return _Origin(sources, _largest(rows), _largest(columns), factors, source.ndim == 3)


def _largest(indices: mx.array) -> np.ndarray:
    """Reduces [n] or [E, n] indices to [n]: the maximum over experts."""
    return np.array(indices).reshape(-1, indices.shape[-1]).max(0).astype(int)


def _update(origin: _Origin, updates: list[LowRank]) -> LowRank:
    """Builds a module's update, for all of its experts at once."""
    columns, rows = mx.array(origin.columns), mx.array(origin.rows)
    factors = mx.array(origin.factors)[:, None]

    def part(update: LowRank) -> LowRank:
        return LowRank(mx.take(update.a, columns, -1), mx.take(update.b, rows, -2) * factors)

    mine = {source: part(updates[source]) for source in _below(origin.sources, len(updates))}
    first = next(iter(mine.values()))
    if not origin.is_stacked or first.a.ndim == 3:
        return first
    rank = max(each.rank for each in mine.values())
    num_in, num_out = first.sizes
    none = LowRank(mx.zeros((rank, num_in)), mx.zeros((num_out, rank)))
    experts = [mine.get(source, none).of_rank(rank) for source in origin.sources.tolist()]
    return LowRank(mx.stack([each.a for each in experts]), mx.stack([each.b for each in experts]))


def _below(sources: Iterable[Any], count: int) -> set[int]:
    return {int(source) for source in sources if source < count}
