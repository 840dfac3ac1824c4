# SPDX-License-Identifier: Apache-2.0
"""Proves that conflicting dispatches on a cache run in order on Metal.

MLX lets dispatches overlap unless it knows of a dependency, and it does not know of kernels that
write through an input. Logger records kernels' arguments; prove() replays them with a model of
MLX's bookkeeping, and lists unordered conflicting pairs; prove_always() requires an order for
any command buffer boundaries and any other encoded work.

The model follows MLX 0.32 (CommandEncoder in mlx/backend/metal/device.cpp, ml-explore/mlx#3630 for
writes after reads; docs/metal-checklist.md has the source of each rule). All buffers are untracked
by Metal, so nothing else orders them:
- dispatches of an encoder overlap; a barrier between everything before and after it is inserted
  before a dispatch that binds an output of one since the last barrier, or writes what such a one
  bound;
- before its first dispatch, an encoder waits for the last earlier encoder that wrote what it
  binds; otherwise encoders overlap, even in different command buffers;
- a command buffer, of one encoder, ends once it has more than MLX_MAX_OPS_PER_BUFFER dispatches.
Not modeled, because no cache is concerned: several streams, dispatches declared concurrent,
temporaries, and that a command buffer also ends with an evaluation or by the size of its buffers: a
large cache ends it at every dispatch, which is ops_per_buffer=0 here.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from metal_kernels.op_common import FENCE_DTYPE, FENCE_SHAPE

# The inputs that each kernel writes through.
WRITTEN = {
    "kv_write": ("key_pool", "value_pool", "key_scales", "value_scales"),
    "kv_blocks": ("pool",),
    "write_states": ("key_pool", "value_pool"),
    "convolution": ("key_pool", "value_pool"),
    "recurrence": ("key_pool", "value_pool"),
}
_CACHES = ("pool", "key_pool", "value_pool", "scales", "key_scales", "value_scales")
_FENCE = (FENCE_SHAPE, FENCE_DTYPE)


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of memory."""

    start: int
    stop: int

    def overlaps(self, other: Span) -> bool:
        return self.start < other.stop and other.start < self.stop


@dataclass(frozen=True)
class Dispatch:
    """A dispatch as MLX sees it, and `written`: inputs written through."""

    name: str
    inputs: tuple[Span, ...]
    outputs: tuple[Span, ...]
    written: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Conflict:
    """Two dispatches by their indices in the log, the earlier first."""

    first: int
    second: int
    names: str
    kind: str  # "write, write", "write, read" or "read, write"


def conflicts(log: Sequence[Dispatch]) -> Iterator[Conflict]:
    """Yields pairs over the same bytes of a cache, at least one of them writing."""
    for j, later in enumerate(log):
        for i, earlier in enumerate(log[:j]):
            if not (earlier.written or later.written):
                continue
            if _meet(earlier.written, later.written):
                kind = "write, write"
            elif _meet(earlier.written, later.inputs):
                kind = "write, read"
            elif _meet(earlier.inputs, later.written):
                kind = "read, write"
            else:
                continue
            yield Conflict(i, j, f"{earlier.name}, {later.name}", kind)


def _meet(some: Iterable[Span], others: Sequence[Span]) -> bool:
    return any(span.overlaps(other) for span in some for other in others)


@dataclass
class Encoder:
    """MLX's bookkeeping of one stream; names are those of its members."""

    ops_per_buffer: int
    buffer: int = 0  # the current command buffer
    epoch: int = 0  # number of barriers
    ops: int = 0
    prev_inputs: set[Span] = field(default_factory=set)  # since the last barrier
    prev_outputs: set[Span] = field(default_factory=set)
    all_inputs: set[Span] = field(default_factory=set)  # of this encoder
    all_outputs: set[Span] = field(default_factory=set)
    prev_ce_outputs: dict[Span, int] = field(default_factory=dict)  # span: last buffer to write it
    waits: list[int] = field(default_factory=list)  # by buffer, bits of those it waits for

    def encode(self, dispatch: Dispatch) -> tuple[int, int]:
        """Returns its command buffer, and the number of earlier barriers there."""
        bound, outputs = {*dispatch.inputs, *dispatch.outputs}, set(dispatch.outputs)
        if bound & self.prev_outputs or outputs & self.prev_inputs:
            self.epoch += 1
            self.prev_inputs, self.prev_outputs = set(), set()
        self.prev_inputs |= bound
        self.prev_outputs |= outputs
        self.all_inputs |= bound
        self.all_outputs |= outputs
        place = (self.buffer, self.epoch)
        self.ops += 1
        if self.ops > self.ops_per_buffer:
            self.end_encoding()
        return place

    def end_encoding(self) -> None:
        waits = 0
        for span in self.all_inputs & self.prev_ce_outputs.keys():
            earlier = self.prev_ce_outputs[span]
            waits |= 1 << earlier | self.waits[earlier]
        self.waits.append(waits)
        self.prev_ce_outputs |= dict.fromkeys(self.all_outputs, self.buffer)
        for spans in (self.prev_inputs, self.prev_outputs, self.all_inputs, self.all_outputs):
            spans.clear()
        self.buffer += 1
        self.epoch = self.ops = 0


def prove(log: Sequence[Dispatch], ops_per_buffer: int) -> list[Conflict]:
    """Returns conflicts that are unordered when MLX encodes the log as it is."""
    encoder = Encoder(ops_per_buffer)
    places = [encoder.encode(dispatch) for dispatch in log]
    encoder.end_encoding()

    def ordered(i: int, j: int) -> bool:
        (buffer, epoch), (later_buffer, later_epoch) = places[i], places[j]
        if buffer == later_buffer:
            return epoch < later_epoch
        return bool(encoder.waits[later_buffer] >> buffer & 1)

    return [pair for pair in conflicts(log) if not ordered(pair.first, pair.second)]


def prove_always(log: Sequence[Dispatch]) -> list[Conflict]:
    """Returns conflicts whose later dispatch does not depend on the earlier one through arrays.

    Such a dependency fixes the encoding order, and each link is a barrier or a wait.
    """
    producers: dict[Span, int] = {}
    ancestors: list[int] = []  # bits
    for i, dispatch in enumerate(log):
        before = 0
        for producer in (producers[span] for span in dispatch.inputs if span in producers):
            before |= 1 << producer | ancestors[producer]
        ancestors.append(before)
        producers |= dict.fromkeys(dispatch.outputs, i)
    return [pair for pair in conflicts(log) if not ancestors[pair.second] >> pair.first & 1]


class Logger:
    """Wraps a kernel compiler, for `kernel.using(Logger(compiler).metal_kernel)`.

    Records only kernels and MLX operations on their fences: other operations could only add order.
    Arrays are identified by address, so none is freed, and by their inputs, so a
    fence that MLX computed from others and evaluated counts as new.
    """

    def __init__(self, compiler: Callable[..., Callable[..., list[mx.array]]]) -> None:
        self.log: list[Dispatch] = []
        self._compiler = compiler
        self._kept: list[mx.array] = []
        self._fences: dict[str, mx.array] = {}  # by our own name

    def metal_kernel(
        self, name: str, input_names: list[str], output_names: list[str], **source: Any
    ) -> Callable[..., list[mx.array]]:
        """Replaces `mx.fast.metal_kernel`."""
        run = self._compiler(
            name=name, input_names=input_names, output_names=output_names, **source
        )

        def call(inputs: list[mx.array], **rest: Any) -> list[mx.array]:
            self._trace([array for array in inputs if (array.shape, array.dtype) == _FENCE])
            outputs = run(inputs=inputs, **rest)
            mx.eval(outputs)
            self._record(name, dict(zip(input_names, inputs, strict=True)), outputs)
            return outputs

        return call

    def _record(self, name: str, inputs: dict[str, mx.array], outputs: list[mx.array]) -> None:
        spans = {key: self._span(array, key in _CACHES) for key, array in inputs.items()}
        written = [
            key for key in WRITTEN.get(name, ()) if inputs[key].ndim > 1
        ]  # not a placeholder
        self.log.append(
            Dispatch(
                name,
                tuple(spans.values()),
                tuple(self._span(array, True) for array in outputs),
                tuple(spans[key] for key in written),
            )
        )
        for array in outputs:
            if (array.shape, array.dtype) == _FENCE:
                self._fences[f"fence{len(self._fences)}"] = array

    def _trace(self, fences: list[mx.array]) -> None:
        """Adds a dispatch for each fence that MLX operations compute from known ones."""
        for fence in fences:
            if any(fence is known for known in self._fences.values()):
                continue
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "graph"
                mx.export_to_dot(str(file), fence, **self._fences)
                sources = set(re.findall(r'"(fence\d+)" ->', file.read_text()))
            if sources:
                known = [self._span(self._fences[source], True) for source in sorted(sources)]
                self.log.append(Dispatch("mlx", tuple(known), (self._span(fence, True),)))
                self._fences[f"fence{len(self._fences)}"] = fence

    def _span(self, array: mx.array, in_place: bool) -> Span:
        """Returns an array's location; empty if MLX binds a copy, which `in_place` forbids."""
        self._kept.append(array)
        view = memoryview(array)  # type: ignore[arg-type]
        if view.nbytes == 0 or not view.c_contiguous:
            if in_place and view.nbytes:
                raise ValueError(f"an array of {array.shape} is not row-contiguous: MLX copies it")
            return Span(0, 0)
        start = np.frombuffer(view, np.uint8).ctypes.data
        return Span(start, start + view.nbytes)
