# SPDX-License-Identifier: Apache-2.0
"""How long each kernel takes, and how fast it reads or writes K/V."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels import kv_blocks, kv_gather, kv_write, paged_attention
from metal_kernels.arguments import CODE_DTYPES
from metal_kernels.selfcheck import Case, dtype_name

_ROUNDS = 5
_CALLS = 20  # of a round, in one go to the device

Call = Callable[[mx.array], mx.array]  # takes the token before it and returns its own


@dataclass(frozen=True)
class Timing:
    """One kernel over one batch."""

    name: str  # which, and of what
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


def timings(case: Case, contexts: tuple[int, int] = (1024, 8192)) -> Iterator[Timing]:
    """All kernels over one layer's pool, which the longer of two contexts fills 1 time, the other 8.

    Args:
        case: of the layer.
        contexts: positions of each of 8 requests, and of one alone.
    """
    short, long = contexts
    layer = _Layer(case, max(8 * short, long))
    name = f"{dtype_name(case.cache_dtype)} cache"
    for rows in (8, 512):
        call, moved = layer.write(rows), 2 * rows * layer.row_bytes
        yield Timing(f"{name}: write {rows} rows", _of_call(call), moved)
    for requests, query, context in ((8, 1, short), (1, 1, long), (1, 512, short)):
        what = f"decode {requests} of {context}" if query == 1 else f"{query} of {context}"
        moved = 2 * requests * context * layer.row_bytes
        call = layer.attend(requests, query, context)
        yield Timing(f"{name}: {what}", _of_call(call), moved)
    gathered, moved = layer.gather(short), short * layer.row_bytes
    yield Timing(f"{name}: gather {short} rows", _of_call(gathered), moved)
    copied, moved = layer.copy(8), 4 * 8 * case.block_size * layer.row_bytes
    yield Timing(f"{name}: copy 8 blocks", _of_call(copied), moved)


class _Layer:
    """A pool, and calls of kernels over it."""

    def __init__(self, case: Case, num_slots: int) -> None:
        shape = case.shape
        self._case = case
        self._blocks = np.arange(-(-num_slots // case.block_size), dtype=np.int32)
        pool = (shape.num_kv_heads, len(self._blocks), case.block_size)
        self._pools = [mx.zeros((*pool, shape.head_size), case.cache_dtype) for _ in range(2)]
        coded = case.cache_dtype in CODE_DTYPES
        self._scales = [mx.zeros(pool) if coded else None for _ in range(2)]
        mx.eval(self._pools, [scales for scales in self._scales if scales is not None])
        #: Of one position's K, or V, for all heads.
        self.row_bytes = shape.num_kv_heads * (
            shape.head_size * case.cache_dtype.size + (4 if coded else 0)
        )

    def write(self, rows: int) -> Call:
        shape = self._case.shape
        keys = mx.ones((rows, shape.num_kv_heads, shape.head_size), self._case.dtype)
        slots = mx.arange(rows)
        return lambda token: kv_write.write(keys, keys, slots, *self._pools, [token], *self._scales)

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

        def call(token: mx.array) -> mx.array:
            out, (read, *_) = paged_attention.run(
                plan,
                queries,
                *self._pools,
                after=token,
                scale=scale,
                key_scales=self._scales[0],
                value_scales=self._scales[1],
            )
            # The output as well, as a split context's reduction comes after the token.
            return read + (out.flatten()[:8] * 0).astype(read.dtype)

        return call

    def gather(self, context: int) -> Call:
        table = mx.array(self._blocks[None, : -(-context // self._case.block_size)])
        pool, scales = self._pools[0], self._scales[0]
        return lambda token: kv_gather.gather(pool, table, self._case.dtype, [token], scales)[1]

    def copy(self, blocks: int) -> Call:
        sources, targets = self._blocks[:blocks], self._blocks[blocks : 2 * blocks]
        return lambda token: kv_blocks.copy(self._pools, sources, targets, [token])


def _of_call(call: Call) -> float:
    def once() -> None:
        token = mx.zeros(8, mx.uint32)
        for _ in range(_CALLS):
            token = call(token)
        mx.eval(token)

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
