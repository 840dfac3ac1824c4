# SPDX-License-Identifier: Apache-2.0
"""Adds low-rank updates to a model's layers, with one adapter per request.

An update is y + B A x (LoRA, Hu et al. 2021, arXiv:2106.09685). The matrices of all slots are
stacked and `gather_mm` picks each token's, so a batch can mix as many adapters as there are slots.
Tokens of requests without an adapter use slot 0, which is all zeros.
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
    """Sizes of a layer that adapters can update, and whether the model calls it."""

    sizes: Sizes
    in_use: bool = False  # whether the model calls it with a step's tokens

    def nbytes(self, rank: int, dtype: mx.Dtype) -> int:
        return self._experts * rank * (self.sizes.num_in + self.sizes.num_out) * int(dtype.size)

    @property
    def _experts(self) -> int:
        return self.sizes.num_experts or 1

    def fits(self, update: LowRank) -> bool:
        """Whether an update has the layer's shape."""
        experts = () if self.sizes.num_experts is None else (self.sizes.num_experts,)
        same = update.sizes == (self.sizes.num_in, self.sizes.num_out)
        return same and update.a.shape[:-2] == experts == update.b.shape[:-2]

    def empty(self, slots: int, rank: int, dtype: mx.Dtype) -> list[mx.array]:
        """Returns zeros for transposed A and B: [slots * E, in, r] and [slots * E, r, out]."""
        count = slots * self._experts
        shapes = (count, self.sizes.num_in, rank), (count, rank, self.sizes.num_out)
        return [mx.zeros(shape, dtype) for shape in shapes]


class Updates:
    """Stacked A and B matrices of a model's layers, with one adapter per slot."""

    def __init__(
        self,
        model: nn.Module,
        num_slots: int,
        rank: int,  # the largest that an adapter may have
        dtype: mx.Dtype,
        # Last parts of the names of modules that can be adapted; None: all.
        only: Iterable[str] | None = None,
    ) -> None:
        self._rank, self.dtype, self._num_slots = rank, dtype, num_slots
        self.layers = _layers(model, only)
        for name, module in model.named_modules():
            if name in self.layers:
                adapt(module, _Update(self, name))
        #: A and B of all slots, by layer.
        self.matrices: dict[str, list[mx.array]] = {}
        self._cached_rows: tuple[mx.array, tuple[mx.array, mx.array]] | None = None
        self._written: dict[int, frozenset[str]] = {}  # layers that are not zeros, by slot
        self._numbers: dict[frozenset[str], int] = {}  # ids of sets of layers
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
        """Finds the layers that a forward calls, by building (not running) one of two tokens."""
        ids = mx.zeros(2, mx.int32)
        extras = {self.extra: ids.astype(mx.uint32)}
        inputs = ForwardInputs(ids, mx.arange(2)[None]).with_extras(extras)
        with bound(inputs):
            model(ids[None])

    def _touch(self, layers: Iterable[str]) -> None:
        """Records the layers that any slot updates; others skip the product."""
        self._touched = frozenset(layers)
        number = self._numbers.setdefault(self._touched, len(self._numbers))
        #: Key of a forward's slots in its extras, [T] uint32. It names the set of touched layers,
        #: since compiled forwards are cached by the keys of their extras.
        self.extra = f"lora_slots_{number}"

    def matrices_of(self, name: str) -> list[mx.array] | None:
        """Returns A and B of a layer for all slots; None if no slot updates it."""
        return self.matrices[name] if name in self._touched else None

    def one_by_one(self, slots: mx.array) -> tuple[mx.array, mx.array]:
        """Returns [n] slots of [n, 1] uint32 `slots`, and 0..n-1; cached for a step's layers."""
        # Without row indices MLX would build them anew in each product.
        if self._cached_rows is None or self._cached_rows[0] is not slots:
            rows = mx.arange(len(slots), dtype=mx.uint32)
            self._cached_rows = slots, (slots[:, 0], rows)
        return self._cached_rows[1]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one adapter at the largest rank."""
        return sum(each.nbytes(self._rank, self.dtype) for each in self.layers.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, including slot 0."""
        return (self._num_slots + 1) * self.slot_bytes

    def heaviest(self, rows: Rows) -> dict[str, mx.array]:
        """Returns the extra inputs of a warm-up forward in which all tokens have adapters."""
        return {self.extra: mx.ones(len(rows.positions_np), mx.uint32)}

    def write(self, slot: int, updates: Mapping[str, LowRank]) -> None:
        """Writes an adapter into a slot, counted from 1; waits for the device.

        `updates` are by layer and have the layers' shapes.
        """
        before = self._written.get(slot, frozenset())
        self._written[slot] = before | frozenset(updates)  # stays so if a write below fails
        for name in before - set(updates):
            self._put(name, slot, None)
        for name, update in updates.items():
            self._put(name, slot, update)
        self._written[slot] = frozenset(updates)
        self._touch(name for layers in self._written.values() for name in layers)

    def _put(self, name: str, slot: int, update: LowRank | None) -> None:
        count = self.layers[name].sizes.num_experts or 1
        where = slice(slot * count, (slot + 1) * count)
        parts = [mx.zeros(())] * 2
        if update is not None:
            whole = update.of_rank(self._rank)
            parts = [array.swapaxes(-1, -2).astype(self.dtype) for array in (whole.a, whole.b)]
        for matrices, part in zip(self.matrices[name], parts, strict=True):
            matrices[where] = part
        # Layer by layer: while a queued step still reads a matrix, a write needs a copy of it.
        mx.eval(self.matrices[name])

    def variables(self, inputs: ForwardInputs) -> dict[str, list[mx.array]] | None:
        """Returns the matrices that a compiled forward of `inputs` reads; None without adapters."""
        if not any(name == self.extra for name, _ in inputs.extras):
            return None
        return {name: self.matrices[name] for name in self._touched}


@dataclass(frozen=True)
class _Update:
    """Computes what an adapter adds to the output of one layer."""

    updates: Updates
    name: str

    def __call__(self, x: mx.array, expert: Expert | None) -> mx.array | None:
        try:
            slots = of_rows(self.updates.extra)
        except KeyError:
            return None
        if self.updates.is_looking:
            if _product_slots(slots, x, expert) is not None:
                self.updates.layers[self.name].in_use = True
            return None
        if (matrices := self.updates.matrices_of(self.name)) is None:
            return None
        if (indices := _product_slots(slots, x, expert)) is None:
            raise RuntimeError(f"{self.name} is called with rows {x.shape}, not those of a step")
        a, b = matrices
        if expert is not None:
            count = self.updates.layers[self.name].sizes.num_experts or 1
            indices = indices * count + expert.indices.astype(mx.uint32)
        elif indices is slots and slots.shape[1] == 1:  # one token per row, as in most layers
            at, rows = self.updates.one_by_one(slots)
            added = mx.gather_mm(x, a, rows, at)
            return mx.gather_mm(added, b, rows, at)
        else:
            added = mx.gather_mm(x[..., None, :], a, rhs_indices=indices)
            return mx.gather_mm(added, b, rhs_indices=indices).squeeze(-2)
        return mx.gather_mm(mx.gather_mm(x, a, rhs_indices=indices), b, rhs_indices=indices)


def _product_slots(slots: mx.array, x: mx.array, expert: Expert | None) -> mx.array | None:
    """Returns the slot of each matrix product; None if rows of `x` are not tokens of `slots`.

    Args:
        slots: [n, L], the slot of each token.
        x: input of a linear layer, [..., in], or of experts, [..., 1 or k, 1, in] or sorted.
        expert: the expert of each row; None for a linear layer.
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
    if rows[: slots.ndim] == slots.shape:  # extra axes, such as heads
        more = (1,) * (len(rows) - slots.ndim)
        return mx.broadcast_to(slots.reshape(*slots.shape, *more), rows)
    return None


def adapter_bytes(model: nn.Module, config: LoRAConfig, dtype: mx.Dtype) -> AdapterBytes:
    """Returns the most bytes that slots and cached adapters take; reads no weights."""
    layers = _layers(model, config.target_modules).values()
    one = sum(layer.nbytes(int(config.max_lora_rank), dtype) for layer in layers)
    return AdapterBytes((config.max_loras + 1) * one, max_cached(config) * one)


def max_cached(config: LoRAConfig) -> int:
    """Returns how many adapters to keep in memory besides those in slots.

    It is --max-cpu-loras plus one: an adapter that is reloaded stays while requests wait for it.
    """
    return (config.max_cpu_loras or config.max_loras) + 1


def _layers(model: nn.Module, only: Iterable[str] | None) -> dict[str, Layer]:
    # Only layers that are called with all tokens of a step: the head gets only some of them.
    of_rows = {id(module) for module in (decoder_of(model) or model).modules()}
    wanted = None if only is None else frozenset(only)
    found = {}
    for name, module in model.named_modules():
        if id(module) in of_rows and (wanted is None or name.rpartition(".")[2] in wanted):
            module_sizes = sizes(module)
            if module_sizes is not None:
                found[name] = Layer(module_sizes)
    return found
