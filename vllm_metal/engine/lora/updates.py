# SPDX-License-Identifier: Apache-2.0
"""Adds low-rank updates to a model's layers: each row's by the adapter that its request named.

An update is that of Hu et al. 2021 (arXiv:2106.09685): y + B A x. The matrices of all adapters that
are in use lie one behind the other, and `gather_mm` picks each row's, so that a batch may have as
many adapters as there are slots. A row whose request names none reads slot 0, of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.engine.attention.forward_inputs import ForwardInputs, bound, of_rows
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.memory.planner import AdapterBytes
from vllm_metal.engine.models.embedding import decoder_of
from vllm_metal.patches.mlx_patches.adapted_linears import Expert, Sizes, adapt, sizes

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig

    from vllm_metal.engine.lora.adapter import LowRank


@dataclass
class Layer:
    """A layer that may be adapted."""

    sizes: Sizes
    in_use: bool = False  # whether the model calls it with a step's rows

    def nbytes(self, rank: int, dtype: mx.Dtype) -> int:
        """Bytes of one update."""
        return self._experts * rank * (self.sizes.num_in + self.sizes.num_out) * int(dtype.size)

    @property
    def _experts(self) -> int:
        return self.sizes.num_experts or 1

    def fits(self, update: LowRank) -> bool:
        """Whether an update is of the layer's shape."""
        experts = () if self.sizes.num_experts is None else (self.sizes.num_experts,)
        same = update.sizes == (self.sizes.num_in, self.sizes.num_out)
        return same and update.a.shape[:-2] == experts == update.b.shape[:-2]

    def empty(self, slots: int, rank: int, dtype: mx.Dtype) -> list[mx.array]:
        """[slots * E, in, r] and [slots * E, r, out] of zeros: A and B, transposed."""
        count = slots * self._experts
        shapes = (count, self.sizes.num_in, rank), (count, rank, self.sizes.num_out)
        return [mx.zeros(shape, dtype) for shape in shapes]


class Updates:
    """The updates of a model's layers, by slot."""

    def __init__(
        self,
        model: nn.Module,
        num_slots: int,
        rank: int,
        dtype: mx.Dtype,
        only: Iterable[str] | None = None,
    ) -> None:
        """
        Args:
            model: mlx-lm's, whose layers are changed.
            num_slots: adapters at once.
            rank: the largest.
            dtype: of the matrices.
            only: last parts of the names of modules that may be adapted; None: all.
        """
        self._rank, self.dtype, self._num_slots = rank, dtype, num_slots
        self.layers = _layers(model, only)
        for name, module in model.named_modules():
            if name in self.layers:
                adapt(module, _Update(self, name))
        #: A and B of all slots by layer.
        self.matrices: dict[str, list[mx.array]] = {}
        self._newest: tuple[mx.array, tuple[mx.array, mx.array]] | None = None
        self._written: dict[int, frozenset[str]] = {}  # layers that are not zeros, by slot
        self._numbers: dict[frozenset[str], int] = {}  # of sets of layers
        self._touch(self.layers)
        self.is_looking = True  # for layers in use
        self._find_layers_in_use(model)
        self.is_looking = False
        self.layers = {name: layer for name, layer in self.layers.items() if layer.in_use}
        self._touch(self.layers)
        for name, layer in self.layers.items():
            self.matrices[name] = layer.empty(num_slots + 1, rank, dtype)
        mx.eval(self.matrices)

    def _find_layers_in_use(self, model: nn.Module) -> None:
        """Builds a forward of two rows, and computes nothing."""
        ids = mx.zeros(2, mx.int32)
        extras = {self.extra: ids.astype(mx.uint32)}
        inputs = ForwardInputs(ids, mx.arange(2)[None]).with_extras(extras)
        with bound(inputs):
            model(ids[None])

    def _touch(self, layers: Iterable[str]) -> None:
        """Notes which layers any slot updates: others compute nothing more."""
        self._touched = frozenset(layers)
        number = self._numbers.setdefault(self._touched, len(self._numbers))
        #: The name of a forward's slots among its extras: [T] uint32, of each row. Which layers are
        #: touched is part of it, and so of what compiled forwards are told apart by.
        self.extra = f"lora_slots_{number}"

    def matrices_of(self, name: str) -> list[mx.array] | None:
        """A and B of a layer in all slots; None: none of them updates it."""
        return self.matrices[name] if name in self._touched else None

    def one_by_one(self, slots: mx.array) -> tuple[mx.array, mx.array]:
        """[n] uint32 slots of [n, 1], and the numbers of the rows: made once for all layers.

        MLX would count the rows anew in each product.
        """
        if self._newest is None or self._newest[0] is not slots:
            rows = mx.arange(len(slots), dtype=mx.uint32)
            self._newest = slots, (slots[:, 0], rows)
        return self._newest[1]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one adapter's updates at the largest rank."""
        return sum(each.nbytes(self._rank, self.dtype) for each in self.layers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return (self._num_slots + 1) * self.slot_bytes

    def heaviest(self, rows: Rows) -> dict[str, mx.array]:
        """The extras of a forward whose rows have adapters."""
        return {self.extra: mx.ones(len(rows.positions_np), mx.uint32)}

    def write(self, slot: int, updates: Mapping[str, LowRank]) -> None:
        """Puts an adapter into a slot, from 1 on; waits for the device.

        Args:
            slot: its place.
            updates: by layer, of shapes that fit.
        """
        before = self._written.get(slot, frozenset())
        self._written[slot] = before | frozenset(updates)  # until all is there
        for name in before - set(updates):
            self._put(name, slot, None)
        for name, update in updates.items():
            self._put(name, slot, update)
        self._written[slot] = frozenset(updates)
        self._touch(name for of_slot in self._written.values() for name in of_slot)

    def _put(self, name: str, slot: int, update: LowRank | None) -> None:
        count = self.layers[name].sizes.num_experts or 1
        where = slice(slot * count, (slot + 1) * count)
        parts = [mx.zeros(())] * 2
        if update is not None:
            whole = update.of_rank(self._rank)
            parts = [array.swapaxes(-1, -2).astype(self.dtype) for array in (whole.a, whole.b)]
        for matrices, part in zip(self.matrices[name], parts, strict=True):
            matrices[where] = part
        mx.eval(self.matrices[name])  # by layer: what a queued step still reads is there twice

    def variables(self, inputs: ForwardInputs) -> dict[str, list[mx.array]] | None:
        """What a compiled forward reads that changes from step to step beside its inputs."""
        if not any(name == self.extra for name, _ in inputs.extras):
            return None
        return {name: self.matrices[name] for name in self._touched}


@dataclass(frozen=True)
class _Update:
    """What is added to the output of one layer."""

    updates: Updates
    name: str

    def __call__(self, x: mx.array, expert: Expert | None) -> mx.array | None:
        try:
            slots = of_rows(self.updates.extra)
        except KeyError:
            return None
        if self.updates.is_looking:
            if _places(slots, x, expert) is not None:
                self.updates.layers[self.name].in_use = True
            return None
        if (matrices := self.updates.matrices_of(self.name)) is None:
            return None
        if (places := _places(slots, x, expert)) is None:
            raise RuntimeError(f"{self.name} is called with rows {x.shape}, not those of a step")
        a, b = matrices
        if expert is not None:
            count = self.updates.layers[self.name].sizes.num_experts or 1
            places = places * count + expert.indices.astype(mx.uint32)
        elif places is slots and slots.shape[1] == 1:  # rows one by one, as in most layers
            at, rows = self.updates.one_by_one(slots)
            added = mx.gather_mm(x, a, rows, at)
            return mx.gather_mm(added, b, rows, at)
        else:
            added = mx.gather_mm(x[..., None, :], a, rhs_indices=places)
            return mx.gather_mm(added, b, rhs_indices=places).squeeze(-2)
        return mx.gather_mm(mx.gather_mm(x, a, rhs_indices=places), b, rhs_indices=places)


def _places(slots: mx.array, x: mx.array, expert: Expert | None) -> mx.array | None:
    """The slot of each matrix product of a call; None: its rows are not those of `slots`.

    Args:
        slots: [n, L] of the rows.
        x: [..., in] of a linear layer; of experts [..., 1, 1, in], [..., k, 1, in] or sorted.
        expert: of each row.
    """
    if expert is not None:
        if expert.rows is not None:
            return slots.reshape(-1)[expert.rows]
        rows = expert.indices.shape[:-1]
        if math.prod(rows) != slots.size:
            return None
        return mx.broadcast_to(slots.reshape(*rows, 1), expert.indices.shape)
    rows = x.shape[:-1]
    if rows == slots.shape:
        return slots
    if math.prod(rows) == slots.size:
        return slots.reshape(rows)
    if rows[: slots.ndim] == slots.shape:  # heads of each row, say
        more = (1,) * (len(rows) - slots.ndim)
        return mx.broadcast_to(slots.reshape(*slots.shape, *more), rows)
    return None


def adapter_bytes(model: nn.Module, config: LoRAConfig, dtype: mx.Dtype) -> AdapterBytes:
    """What an engine's adapters take, of all layers that may be adapted, at the largest rank.

    Args:
        model: mlx-lm's; its weights are not read.
        config: vLLM's settings.
        dtype: of the model.
    """
    layers = _layers(model, config.target_modules).values()
    one = sum(layer.nbytes(int(config.max_lora_rank), dtype) for layer in layers)
    return AdapterBytes((config.max_loras + 1) * one, kept_at_most(config) * one)


def kept_at_most(config: LoRAConfig) -> int:
    """Adapters that are kept beside those in slots: --max-cpu-loras, and one.

    That one is what a reload takes the place of, for requests that wait with it.
    """
    return (config.max_cpu_loras or config.max_loras) + 1


def _layers(model: nn.Module, only: Iterable[str] | None) -> dict[str, Layer]:
    """Layers that are called with all rows of a step: of the head, which is called with some of
    them, there are none."""
    of_rows = {id(module) for module in (decoder_of(model) or model).modules()}
    wanted = None if only is None else frozenset(only)
    found = {}
    for name, module in model.named_modules():
        if id(module) in of_rows and (wanted is None or name.rpartition(".")[2] in wanted):
            of_module = sizes(module)
            if of_module is not None:
                found[name] = Layer(of_module)
    return found
