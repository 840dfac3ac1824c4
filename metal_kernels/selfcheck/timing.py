# SPDX-License-Identifier: Apache-2.0
"""How long each kernel takes, and how fast it reads or writes K/V."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels import kv_blocks, kv_gather, kv_states, kv_write, paged_attention
from metal_kernels.op_common import BITS, CODE_DTYPES, FENCE_DTYPE, FENCE_SHAPE, SCALE_DTYPE
from metal_kernels.selfcheck.case import Case, dtype_name

_ROUNDS = 5
_CALLS = 20  # of a round, queued together

#: Takes the fence of the call before; returns its own fence and its other outputs.
Call = Callable[[mx.array], list[mx.array]]


@dataclass(frozen=True)
class Timing:
    """One kernel over one batch."""

    name: str  # kernel and batch
    seconds: float  # of a call: the median of rounds of calls, each after the one before
    moved: int  # bytes of K/V that it must read or write

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.moved / self.seconds


def copy_bandwidth(size: int = 2**28) -> float:
    """Bytes a second, read and written, of MLX's own elementwise pass over `size` bytes."""
    source = mx.zeros(size // 4, mx.float32)
    mx.eval(source)

    def once() -> None:
        mx.eval(source + 1)

    return 2 * size / _median(once)


@dataclass(frozen=True)
class Work:
    """One kernel over one batch, to be timed."""

    name: str  # kernel and batch
    call: Call
    moved: int  # bytes of K/V that it must read or write

    def measure(self) -> Timing:
        """Times it. A compiler's or a driver's error passes through."""
        return Timing(self.name, _of_call(self.call), self.moved)


def works(case: Case, contexts: tuple[int, int] = (1024, 8192)) -> list[Work]:
    """Calls to time over one layer's pool; none of latent attention.

    Args:
        case: of the layer.
        contexts: positions of each of 8 requests, and of one alone.
    """
    short, long = contexts
    chunk, blocks = short // 2, 8
    layer = _Layer(case, max(8 * short, long))
    name = f"{dtype_name(case.cache_dtype)} cache"
    rows = layer.row_bytes
    calls: list[tuple[str, Call, int]] = [
        ("write 8 rows", layer.write(8), 2 * 8 * rows),
        (f"write {chunk} rows", layer.write(chunk), 2 * chunk * rows),
        (f"decode 8 of {short}", layer.attend(8, 1, short), 2 * 8 * short * rows),
        (f"decode 1 of {long}", layer.attend(1, 1, long), 2 * long * rows),
        (f"prefill {chunk} of {short}", layer.attend(1, chunk, short), 2 * short * rows),
        (f"gather K of {short}", layer.gather(short), short * rows),
        (f"copy {blocks} blocks", layer.copy(blocks), 4 * blocks * case.block_size * rows),
        (f"read {blocks} states", layer.read_states(blocks), blocks * layer.state_bytes),
        (f"write {blocks} states", layer.write_states(blocks), blocks * layer.state_bytes),
    ]
    return [Work(f"{name}: {what}", call, moved) for what, call, moved in calls]


class _Layer:
    """A pool, and calls of kernels over it."""

    def __init__(self, case: Case, num_slots: int) -> None:
        shape = case.shape
        self._case = case
        self._blocks = np.arange(-(-num_slots // case.block_size), dtype=np.int32)
        pool = (shape.num_kv_heads, len(self._blocks), case.block_size)
        coded = case.cache_dtype in CODE_DTYPES
        self._keys, self._values = (
            mx.zeros((*pool, shape.head_size), case.cache_dtype) for _ in range(2)
        )
        self._key_scales, self._value_scales = (
            mx.zeros(pool, SCALE_DTYPE) if coded else None for _ in range(2)
        )
        mx.eval(self._arrays())
        #: Bytes of one position's K, or V, of all heads.
        self.row_bytes = shape.num_kv_heads * (
            shape.head_size * case.cache_dtype.size + (SCALE_DTYPE.size if coded else 0)
        )

    def write(self, num_rows: int) -> Call:
        shape = self._case.shape
        rows = mx.ones((num_rows, shape.num_kv_heads, shape.head_size), self._case.dtype)
        slots = mx.arange(num_rows)
        keys_to, values_to = self._keys, self._values
        scales = (self._key_scales, self._value_scales)
        return lambda fence: [
            kv_write.write(rows, rows, slots, keys_to, values_to, [fence], *scales)
        ]

    def attend(self, requests: int, query: int, context: int) -> Call:
        case = self._case
        width = -(-context // case.block_size)
        plan = paged_attention.plan(
            np.arange(requests + 1, dtype=np.int32) * query,
            np.full(requests, context, np.int32),
            self._blocks[: requests * width].reshape(requests, width),
            case.shape,
            case.window,
        )
        rows = (requests * query, case.shape.num_heads, case.shape.head_size)
        queries = mx.ones(rows, case.dtype)
        scale = case.shape.head_size**-0.5

        def call(fence: mx.array) -> list[mx.array]:
            out, (read, *_) = paged_attention.run(
                plan,
                queries,
                self._keys,
                self._values,
                after=fence,
                scale=scale,
                key_scales=self._key_scales,
                value_scales=self._value_scales,
            )
            return [read, out]  # where contexts are split, the output comes after the fence

        return call

    def gather(self, context: int) -> Call:
        table = mx.array(self._blocks[None, : -(-context // self._case.block_size)])
        keys, scales, dtype = self._keys, self._key_scales, self._case.dtype
        return lambda fence: [*reversed(kv_gather.gather(keys, table, dtype, [fence], scales))]

    def copy(self, blocks: int) -> Call:
        sources, targets = self._blocks[:blocks], self._blocks[blocks : 2 * blocks]
        return lambda fence: [kv_blocks.copy(self._arrays(), sources, targets, [fence])]

    @property
    def state_bytes(self) -> int:
        """Of a state that fills a block."""
        return self._width * self._keys.dtype.size

    @property
    def _width(self) -> int:
        return 2 * self._keys.size // self._keys.shape[1]

    def read_states(self, count: int) -> Call:
        pools, blocks = [self._keys, self._values], mx.array(self._blocks[:count])
        return lambda fence: [*reversed(kv_states.read(pools, blocks, self._width, after=[fence]))]

    def write_states(self, count: int) -> Call:
        pools, blocks = [self._keys, self._values], self._blocks[:count]
        states = mx.zeros((count, self._width), BITS[self._keys.dtype.size])
        return lambda fence: [kv_states.write(pools, blocks, states, after=[fence])]

    def _arrays(self) -> list[mx.array]:
        arrays = (self._keys, self._values, self._key_scales, self._value_scales)
        return [array for array in arrays if array is not None]


def _of_call(call: Call) -> float:
    def once() -> None:
        fence, results = mx.zeros(FENCE_SHAPE, FENCE_DTYPE), []
        for _ in range(_CALLS):
            fence, *others = call(fence)
            results += others
        mx.eval(fence, results)

    return _median(once) / _CALLS


def _median(once: Callable[[], None]) -> float:
    """Seconds; the first round, which compiles, does not count."""
    once()
    seconds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
