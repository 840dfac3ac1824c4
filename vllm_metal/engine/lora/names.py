# SPDX-License-Identifier: Apache-2.0
"""Finds the modules of mlx-lm's model that PEFT's names mean, by the model's own renaming.

A checkpoint's weights go through the `sanitize` of mlx-lm's model, which renames, stacks, splits
and reorders them. Arrays that say where each element came from go the same way here, so that an
update lands on the rows and columns that it was trained for.
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

#: Names of an expert's projections, in checkpoints with a module an expert.
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w2", "w3"))
_EXPERT = re.compile(r"(.*\blayers\.)(\d+)(\..+\.experts\.)\d+\.(\w+)\.weight")
_LAYER = re.compile(r".*\blayers\.(\d+)\..+")
#: Where a text model beside a tower is, in transformers and in mlx-lm; checkpoints have either.
_TEXT_THERE, _TEXT_HERE = "model.language_model.", "language_model.model."
_ALL, _GATE_UP, _DOWN = ".experts", ".experts.gate_up_proj", ".experts.down_proj"
#: float32 counts exactly up to here.
_MOST = 2**24


#: Shape of a weight that a model looks for and an adapter does not have: as a convolution's in a
#: checkpoint of transformers', which some models tell from their own by it.
_LACKING = (1, 1, 4)


class _Unplaced(Exception):
    """What is wrong with where an update would land."""


class _Lacking(Exception):
    """The key of a weight that mlx-lm's model looks for."""


@dataclass(frozen=True)
class _Weights:
    """A checkpoint's weights as far as an adapter concerns them."""

    names: list[str]  # of updates, by place
    shapes: dict[str, tuple[int, ...]]  # by key: those of the updates, in their order, then others
    transposed: bool  # whether matrices are [in, out]

    def arrays(self, values: str) -> dict[str, mx.array]:
        """By key, arrays whose elements say their "source", "row" or "column", or are 1: "factor".

        Lazy.
        """
        return {
            key: self._array(values, place, shape)
            for place, (key, shape) in enumerate(self.shapes.items())
        }

    def _array(self, values: str, place: int, shape: tuple[int, ...]) -> mx.array:
        if values == "factor":
            array = mx.ones((1, 1))
        elif values == "source":
            array = mx.full((1, 1), float(place))
        elif values == "row":
            array = mx.arange(shape[-2], dtype=mx.float32)[:, None]
        else:
            array = mx.arange(shape[-1], dtype=mx.float32)[None]
        array = mx.broadcast_to(array, shape)
        return array.T if self.transposed and array.ndim == 2 else array


@dataclass(frozen=True)
class _Origin:
    """Where each element of a weight came from."""

    sources: np.ndarray  # [E] int, of each expert, or [1]: which weight
    rows: np.ndarray  # [out] int
    columns: np.ndarray  # [in] int
    factors: np.ndarray  # [out] float32, what the model's `sanitize` multiplies its rows with
    is_stacked: bool  # of experts


def on_modules(adapter: Adapter, model: nn.Module) -> dict[str, LowRank]:
    """An adapter's updates by the modules of mlx-lm's model.

    Args:
        adapter: as read.
        model: mlx-lm's, as loaded.

    Raises:
        AdapterError: a name means no module, or the updates of several modules would make one.
    """
    if not adapter.is_peft:
        return dict(adapter.updates)
    try:
        weights, origins = _placed(_weights(adapter, model), model)
    except _Unplaced as error:
        raise AdapterError(adapter.name, str(error)) from error
    updates = [adapter.updates[name] for name in weights.names]
    found = {module: _update(origin, updates) for module, origin in origins.items()}
    landed = {int(source) for origin in origins.values() for source in origin.sources}
    for place, name in enumerate(weights.names):
        if place not in landed:
            raise AdapterError(adapter.name, f"updates {name}, which the model does not have")
    return found


def _placed(weights: _Weights, model: nn.Module) -> tuple[_Weights, dict[str, _Origin]]:
    """The origins of a model's weights; with all the weights that its `sanitize` asked for."""
    while True:
        try:
            return weights, _origins(weights, model)
        except _Lacking as lacking:
            weights = replace(weights, shapes=weights.shapes | {str(lacking): _LACKING})


def switches(model: nn.Module) -> dict[str, Any]:
    """Experts' projections by path."""
    linears = (SwitchLinear, QuantizedSwitchLinear)
    return {name: each for name, each in model.named_modules() if isinstance(each, linears)}


def _weights(adapter: Adapter, model: nn.Module) -> _Weights:
    shapes: dict[str, tuple[int, ...]] = {}
    for name, update in adapter.updates.items():
        num_in, num_out = update.sizes
        if max(num_in, num_out) >= _MOST:
            raise _Unplaced(f"updates {name}, which is too large")
        shapes[_key(name, update, model)] = (*update.a.shape[:-2], num_out, num_in)
    if len(shapes) < len(adapter.updates):
        raise _Unplaced("updates one array of experts twice")
    shapes = shapes | dict(_other_experts(shapes, model))
    return _Weights(list(adapter.updates), shapes, adapter.fan_in_fan_out)


def _key(name: str, update: LowRank, model: nn.Module) -> str:
    """The name of a checkpoint's array.

    PEFT names experts that lie in one array by their module alone, twice where it has two arrays:
    `experts` and `experts.base_layer`. Which array it is shows in its shape.
    """
    if name.startswith(_TEXT_THERE) and hasattr(getattr(model, "language_model", None), "model"):
        name = _TEXT_HERE + name.removeprefix(_TEXT_THERE)
    if update.a.ndim == 2:
        return _published(f"{name}.weight", model)
    prefix = name.removesuffix(".base_layer").removesuffix(_ALL)
    for path, linear in switches(model).items():
        outer, inner = linear.input_dims, linear.output_dims
        if path.endswith("gate_proj") and update.sizes == (outer, 2 * inner):
            return prefix + _GATE_UP
        if path.endswith("down_proj") and update.sizes == (outer, inner):
            return prefix + _DOWN
    return f"{prefix}{_ALL}"


def _published(key: str, model: nn.Module) -> str:
    """The key of published files for one of transformers 5, which renames some modules.

    What mlx-lm's model has by the same name stays: transformers also maps two names to one, which
    its way back does not tell apart (Kimi Linear's dense and sparse layers).
    """
    if key.removesuffix(".weight") in dict(model.named_modules()):
        return key
    for renaming in _renamings(getattr(model, "model_type", "")):
        key, _ = renaming.rename_source_key(key)
    return key


@cache
def _renamings(model_type: str) -> tuple[WeightRenaming, ...]:
    """transformers' renamings of a family, from its modules' names to those of published files."""
    found = get_checkpoint_conversion_mapping(model_type) or ()
    return tuple(
        renaming.reverse_transform()
        for renaming in reversed(found)
        if type(renaming) is WeightRenaming
    )


def _other_experts(
    shapes: Mapping[str, tuple[int, ...]], model: nn.Module
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Shapes of experts that have no update: mlx-lm's models look for all of a layer's."""
    of_all = {
        (match[1], match[3], match[4]): shape
        for key, shape in shapes.items()
        if (match := _EXPERT.fullmatch(key))
    }
    num_experts = max((each.num_experts for each in switches(model).values()), default=0)
    for before, after in {(before, after) for before, after, _ in of_all}:
        for names in _PROJECTIONS:
            if not any((before, after, name) in of_all for name in names):
                continue
            for layer in range(len(model.layers)):
                for name in names:
                    shape = of_all.get((before, after, name), (1, 1))
                    for expert in range(num_experts):
                        key = f"{before}{layer}{after}{expert}.{name}.weight"
                        if key not in shapes:
                            yield key, shape


def _origins(weights: _Weights, model: nn.Module) -> dict[str, _Origin]:
    """The origins of the model's weights that come of an adapter's, by module."""
    sources, rows, columns, factors = (
        _renamed(model, weights.arrays(values)) for values in ("source", "row", "column", "factor")
    )
    found = {}
    for key, factor in factors.items():
        module = key.removesuffix(".weight")
        source, row, column = (
            _nearly_whole(array[key] / factor) for array in (sources, rows, columns)
        )
        if (source < len(weights.names)).any().item():
            found[module] = _origin(module, source, row, column, factor)
    return found


def _renamed(model: nn.Module, arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """What mlx-lm's model makes of arrays of a checkpoint."""
    given = set(arrays)
    if hasattr(model, "sanitize"):
        try:
            with _left_as_it_is(model):
                arrays = model.sanitize(arrays)
        except KeyError as error:  # of mlx-lm's code, which expects a whole checkpoint
            if not error.args or not isinstance(error.args[0], str) or error.args[0] in given:
                raise _Unplaced(f"has names that mlx-lm's model cannot rename ({error})") from error
            raise _Lacking(error.args[0]) from error
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise _Unplaced(f"has names that mlx-lm's model cannot rename ({problem})") from error
    renamed: dict[str, mx.array] = {}
    for key, array in arrays.items():
        renamed |= _of_one_array(key, array, model)
    return renamed


@contextmanager
def _left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Undoes what `sanitize` does to the model itself.

    Gemma's drop their head if they see no weights of it, and fail if it was dropped before.
    """
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


def _of_one_array(key: str, array: mx.array, model: nn.Module) -> dict[str, mx.array]:
    """Experts by projection, where a checkpoint has them in one array that mlx-lm does not read.

    transformers has [E, 2 * inner, outer] of gate and up, one after the other, and
    [E, outer, inner].
    """
    if not key.endswith((_GATE_UP, _DOWN)):
        return {key: array}
    layer = _LAYER.fullmatch(key)
    of_layer = {
        path.rpartition(".")[2]: path
        for path in switches(model)
        if layer and (match := _LAYER.fullmatch(path)) and match[1] == layer[1]
    }
    if not {"gate_proj", "up_proj", "down_proj"} <= set(of_layer):
        return {key: array}
    if key.endswith(_DOWN):
        return {f"{of_layer['down_proj']}.weight": array}
    middle = array.shape[-2] // 2
    return {
        f"{of_layer['gate_proj']}.weight": array[..., :middle, :],
        f"{of_layer['up_proj']}.weight": array[..., middle:, :],
    }


def _nearly_whole(array: mx.array) -> mx.array:
    """Numbers that were multiplied and divided, as they were before."""
    rounded = mx.round(array)
    return mx.where(mx.abs(array - rounded) < 1e-2, rounded, array)


def _origin(
    module: str, source: mx.array, row: mx.array, column: mx.array, factor: mx.array
) -> _Origin:
    """
    Args:
        module: the weights', for messages.
        source, row, column, factor: [out, in] or [E, out, in] float32, of each element.
    """
    # Of experts each has a source of its own, and rows and columns as the others have.
    edges = [source[..., 0, 0], source[..., -1, 0], source[..., 0, -1], source[..., -1, -1]]
    rows, columns = row[..., :, 0], column[..., 0, :]
    same = [mx.array_equal(edge, edges[0]) for edge in edges]
    same += [mx.array_equal(rows, row[..., :, -1]), mx.array_equal(columns, column[..., -1, :])]
    same += [mx.array_equal(factor[..., 0], factor[..., -1])]
    whole = [mx.array_equal(array, mx.round(array)) for array in (edges[0], rows, columns)]
    sources = np.atleast_1d(np.array(edges[0])).astype(int)
    if not all(each.item() for each in (*same, *whole)):
        raise _Unplaced(f"updates parts of {module}, which mlx-lm's model has as one")
    factors = np.array(factor[..., 0]).reshape(-1, factor.shape[-2])[0]
    return _Origin(sources, _of_any(rows), _of_any(columns), factors, source.ndim == 3)


def _of_any(indices: mx.array) -> np.ndarray:
    """[n] int of [n] or [E, n] indices: of the expert with most, all others are parts of them."""
    return np.array(indices).reshape(-1, indices.shape[-1]).max(0).astype(int)


def _update(origin: _Origin, updates: list[LowRank]) -> LowRank:
    """The update of a module, or of all its experts."""
    columns, rows = mx.array(origin.columns), mx.array(origin.rows)
    factors = mx.array(origin.factors)[:, None]

    def part(update: LowRank) -> LowRank:
        return LowRank(mx.take(update.a, columns, -1), mx.take(update.b, rows, -2) * factors)

    mine = {source: part(updates[source]) for source in _below(origin.sources, len(updates))}
    some = next(iter(mine.values()))
    if not origin.is_stacked or some.a.ndim == 3:
        return some
    rank = max(each.rank for each in mine.values())
    num_in, num_out = some.sizes
    none = LowRank(mx.zeros((rank, num_in)), mx.zeros((num_out, rank)))
    experts = [mine.get(source, none).of_rank(rank) for source in origin.sources.tolist()]
    return LowRank(mx.stack([each.a for each in experts]), mx.stack([each.b for each in experts]))


def _below(sources: Iterable[Any], count: int) -> set[int]:
    return {int(source) for source in sources if source < count}
