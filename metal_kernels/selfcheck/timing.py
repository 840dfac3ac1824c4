# SPDX-License-Identifier: Apache-2.0
"""Times each kernel, and decides whether it or MLX's attention is faster."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels import kv_blocks, kv_gather, kv_states, kv_write, paged_attention
from metal_kernels.op_common import (
    BITS,
    FENCE_DTYPE,
    FENCE_SHAPE,
    QUANTIZED_DTYPES,
    SCALE_DTYPE,
    merged,
)
from metal_kernels.pace import MOST_WORK
from metal_kernels.paged_attention import (
    AttentionPlan,
    Splits,
    Tiles,
    buckets,
    gathered,
    prompts,
)
from metal_kernels.paged_attention.buckets import BucketPlan
from metal_kernels.paged_attention.fused import is_plain
from metal_kernels.paged_attention.prompts import PromptPlan
from metal_kernels.paged_attention.splits import DEFAULT
from metal_kernels.selfcheck import contiguous
from metal_kernels.selfcheck.case import BACKENDS, Case, dtype_name

#: Bytes of K and V that calls cycle through, so that none finds its own in a system cache: an
#: Ultra's holds 96 MB.
ROTATED = 2**28
_ROUNDS = 5
_CALLS = 20  # per round, queued together
#: Batches to time by choice: (requests, rows of each, positions of each). Contexts are halved if
#: the calls of a round would exceed a command buffer.
COMPARED = {
    "decode_way": ((8, 1, 1024), (1, 1, 8192)),
    "prefill_way": tuple((1, rows, 4096) for rows in (64, 128, 256, 512)),
}
_COMPARED_CALLS = {"decode_way": 20, "prefill_way": 2}

#: Takes the previous call's fence; returns its own fence and its other outputs.
Call = Callable[[mx.array], list[mx.array]]


def rotated_here() -> int:
    """Returns the bytes of K and V that timed calls cycle through: ROTATED on a GPU, else 0."""
    return ROTATED if mx.default_device().type == mx.DeviceType.gpu else 0


def copy_bandwidth(size: int = 2**28) -> float:
    """Measures an elementwise MLX operation on `size` bytes; returns bytes/s read and written."""
    source = mx.zeros(size // 4, mx.float32)
    mx.eval(source)

    (seconds,) = in_turn([lambda fence: [fence, source + 1]], 1)
    return 2 * size / seconds


@dataclass(frozen=True)
class Work:
    """A kernel call to time."""

    name: str  # kernel and batch
    call: Call
    moved: int  # bytes of K/V to read or write

    def seconds(self) -> float:
        """Returns seconds per call: the median of rounds of dependent calls."""
        (seconds,) = in_turn([self.call], _CALLS)
        return seconds


def works(case: Case, contexts: tuple[int, int] = (1024, 8192)) -> list[Work]:
    """Returns kernel calls to time over one layer's pool; does not support latent attention.

    contexts: context length with 8 requests, and with one.
    """
    short, long = contexts
    chunk, blocks = short // 2, 8
    layer = Layer(case, max(8 * short, long))
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


def compare(
    case: Case,
    choice: str,
    tiles: Tiles,
    batches: Sequence[tuple[int, int, int]] = (),
    clock: Callable[[], float] = time.perf_counter,
    rotated: int | None = None,
) -> dict[str, dict[str, float]]:
    """Times our kernels and MLX's alternately, so that a slowing machine affects both.

    Args:
        batches: requests, rows of each, positions of each; empty: COMPARED[choice].
        clock: returns seconds.
        rotated: bytes of K and V that the calls cycle through; None: ROTATED on a GPU.

    Returns:
        Median seconds per call, by BACKENDS ("metal", "mlx"), then call. Decodes include
        "contiguous", MLX's attention over contiguous K and V, if MLX supports the case.
    """
    calls = _COMPARED_CALLS[choice]
    batches = [bounded(case, batch, calls) for batch in batches or COMPARED[choice]]
    layer = Layer(case, max(requests * context for requests, _, context in batches), rotated)
    found: dict[str, dict[str, float]] = {backend: {} for backend in BACKENDS}
    for requests, query, context in batches:
        name = f"{requests} x {query} of {context}"
        ours, gathering = BACKENDS
        by_backend = {
            ours: layer.attend(requests, query, context, tiles),
            gathering: layer.attend_gathered(requests, query, context),
        }
        if choice == "decode_way" and contiguous.serves(case):
            size = rotated_here() if rotated is None else rotated
            by_backend[contiguous.BACKEND] = contiguous.attend(case, requests, query, context, size)
        times = in_turn([*by_backend.values()], calls, clock)
        for backend, seconds in zip(by_backend, times, strict=True):
            found.setdefault(backend, {})[name] = seconds
    return found


def bounded(case: Case, batch: tuple[int, int, int], calls: int) -> tuple[int, int, int]:
    """Halves the batch's context until `calls` calls fit in a command buffer."""
    requests, query, context = batch
    rows = query * case.shape.group
    while context > query and calls * case.shape.work(rows, requests * context) > MOST_WORK:
        context = max(context // 2, query)
    return requests, query, context


def in_turn(
    alternatives: Sequence[Call], calls: int, clock: Callable[[], float] = time.perf_counter
) -> Iterator[float]:
    """Times alternative calls in turn; returns median seconds per call, without compilation."""
    rounds: list[list[float]] = [[] for _ in alternatives]
    for number in range(_ROUNDS + 1):
        for call, seconds in zip(alternatives, rounds, strict=True):
            start = clock()
            queue(call, calls)
            took = clock() - start
            if number:
                seconds.append(took / calls)
    return map(statistics.median, rounds)


class Layer:
    """A pool, and kernel calls over it; each call uses other blocks than the previous one."""

    def __init__(self, case: Case, num_slots: int, rotated: int | None = None) -> None:
        """num_slots: slots for the largest call. rotated: minimum bytes; None: ROTATED on a GPU."""
        shape, self.row_bytes = case.shape, case.row_bytes
        self._case = case
        coded = case.cache_dtype in QUANTIZED_DTYPES
        rotated = rotated_here() if rotated is None else rotated
        slots = max(num_slots, rotated // ((1 if shape.latent else 2) * self.row_bytes))
        self._blocks = np.arange(-(-slots // case.block_size), dtype=np.int32)
        pool = (shape.num_kv_heads, len(self._blocks), case.block_size)
        self._keys, self._values = (
            mx.zeros((*pool, size), case.cache_dtype)
            for size in (shape.head_size, shape.value_size)
        )
        if shape.latent:
            self._values = self._keys
        self._key_scales, self._value_scales = (
            mx.zeros(pool, SCALE_DTYPE) if coded else None for _ in range(2)
        )
        if shape.latent:
            self._value_scales = self._key_scales
        mx.eval(self._arrays())

    def _rotate_blocks(self, blocks: int, call_of: Callable[[np.ndarray], Call]) -> Call:
        """Returns a call that runs on the next `blocks` blocks of the pool each time."""
        count = max(len(self._blocks) // blocks, 1)
        calls = [
            call_of(self._blocks[first : first + blocks])
            for first in range(0, count * blocks, blocks)
        ]
        turn = itertools.cycle(calls)
        return lambda fence: next(turn)(fence)

    def write(self, num_rows: int) -> Call:
        shape = self._case.shape
        keys, values = (
            mx.ones((num_rows, shape.num_kv_heads, size), self._case.dtype)
            for size in (shape.head_size, shape.value_size)
        )
        keys_to, values_to = self._keys, self._values
        scales, block_size = (self._key_scales, self._value_scales), self._case.block_size

        def call_of(blocks: np.ndarray) -> Call:
            slots = mx.array(np.arange(num_rows, dtype=np.int32) + blocks[0] * block_size)
            return lambda fence: [
                kv_write.write(keys, values, slots, keys_to, values_to, [fence], *scales)
            ]

        return self._rotate_blocks(-(-num_rows // block_size), call_of)

    def attend(
        self,
        requests: int,
        query: int,
        context: int,
        tiles: Tiles | None = None,
        splits: Splits = DEFAULT,
        common: int = 0,
    ) -> Call:
        """Returns a call of our kernels, for requests that share their first `common` positions."""
        case, num_common = self._case, common // self._case.block_size

        def call_of(blocks: np.ndarray) -> Call:
            starts, lens, tables = self._layout(requests, query, context, blocks)
            tables = np.where(np.arange(tables.shape[1]) < num_common, tables[0], tables)
            plan = paged_attention.plan(
                starts,
                lens,
                tables,
                case.shape,
                case.window,
                tiles,
                splits=splits,
                block_size=case.block_size,
            )
            return self._attend_call(plan, paged_attention.run, requests * query)

        return self._rotate_blocks(requests * self._width_of(context), call_of)

    def attend_gathered(
        self, requests: int, query: int, context: int, force_fused: bool | None = None
    ) -> Call:
        """Returns a call of MLX's attention over contexts that `kv_gather` reads.

        `force_fused`: see `prompts.plan`.
        """
        case = self._case
        if is_plain(case.shape, case.dtype, case.softcap):
            force_fused = False

        def call_of(blocks: np.ndarray) -> Call:
            layout = self._layout(requests, query, context, blocks)
            if query > buckets.DECODE_ROWS:
                prompt_plan = prompts.plan(
                    *layout, case.block_size, case.shape, case.window, force_fused
                )
                return self._attend_call(prompt_plan, prompts.run, requests * query)
            nowhere = np.full(requests * query, -1, np.int32)
            plan = buckets.plan(*layout, nowhere, case.block_size, case.window, bounded=True)
            return self._attend_call(plan, gathered.run, requests * query)

        return self._rotate_blocks(requests * self._width_of(context), call_of)

    def _width_of(self, context: int) -> int:
        return -(-context // self._case.block_size)

    def _layout(
        self, requests: int, query: int, context: int, blocks: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return (
            np.arange(requests + 1, dtype=np.int32) * query,
            np.full(requests, context, np.int32),
            blocks.reshape(requests, self._width_of(context)),
        )

    def _attend_call(
        self,
        plan: AttentionPlan | BucketPlan | PromptPlan,
        run: Callable[..., tuple[mx.array, list[mx.array]]],
        num_rows: int,
    ) -> Call:
        shape = self._case.shape
        queries = mx.ones((num_rows, shape.num_heads, shape.head_size), self._case.dtype)

        def call(fence: mx.array) -> list[mx.array]:
            out, reads = run(
                plan,
                queries,
                self._keys,
                self._values,
                after=fence,
                scale=shape.head_size**-0.5,
                softcap=self._case.softcap,
                key_scales=self._key_scales,
                value_scales=self._value_scales,
            )
            # With split contexts, the output comes after the fence.
            return [merged(reads), out]

        return call

    def gather(self, context: int) -> Call:
        keys, scales, dtype = self._keys, self._key_scales, self._case.dtype

        def call_of(blocks: np.ndarray) -> Call:
            table = mx.array(blocks[None])
            return lambda fence: [*reversed(kv_gather.gather(keys, table, dtype, [fence], scales))]

        return self._rotate_blocks(self._width_of(context), call_of)

    def copy(self, blocks: int) -> Call:
        def call_of(both: np.ndarray) -> Call:
            sources, targets = both[:blocks], both[blocks:]
            return lambda fence: [kv_blocks.copy(self._arrays(), sources, targets, [fence])]

        return self._rotate_blocks(2 * blocks, call_of)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state as large as a block."""
        return self._width * self._keys.dtype.size

    @property
    def _width(self) -> int:
        return 2 * self._keys.size // self._keys.shape[1]

    def read_states(self, count: int) -> Call:
        pools = [self._keys, self._values]

        def call_of(blocks: np.ndarray) -> Call:
            table = mx.array(blocks)
            return lambda fence: [
                *reversed(kv_states.read(pools, table, self._width, after=[fence]))
            ]

        return self._rotate_blocks(count, call_of)

    def write_states(self, count: int) -> Call:
        pools = [self._keys, self._values]
        states = mx.zeros((count, self._width), BITS[self._keys.dtype.size])
        return self._rotate_blocks(
            count,
            lambda blocks: lambda fence: [kv_states.write(pools, blocks, states, after=[fence])],
        )

    def _arrays(self) -> list[mx.array]:
        arrays = (self._keys, self._values, self._key_scales, self._value_scales)
        return [array for array in arrays if array is not None]


def queue(call: Call, count: int) -> None:
    """Runs `count` calls, each dependent on the previous one, and waits for the last."""
    fence, results = mx.zeros(FENCE_SHAPE, FENCE_DTYPE), []
    for _ in range(count):
        fence, *others = call(fence)
        results += others
    mx.eval(fence, results)
