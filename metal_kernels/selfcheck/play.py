# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels of an engine's steps; each step is queued while the previous one runs."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from metal_kernels import kernel, kv_blocks, kv_gather, kv_states, kv_write, paged_attention
from metal_kernels.kv_write import Rotation
from metal_kernels.kv_write.reference import Pools
from metal_kernels.layout import RaggedLayout
from metal_kernels.op_common import block_elements, merged
from metal_kernels.paged_attention import AttentionPlan, Splits, Tiles, prompts
from metal_kernels.paged_attention.fused import is_plain
from metal_kernels.paged_attention.splits import ALWAYS, WALKS
from metal_kernels.plan_arrays import all_else, with_arrays
from metal_kernels.selfcheck.case import Case, Check
from metal_kernels.selfcheck.steps import Step, contents

#: Layers of a step; they share the pool, so reads and writes alternate within a step.
LAYERS = 2
#: Rows of the matrix product that runs during each step, some 1 ms of a GPU.
_LOAD = 1024


class _Pool:
    """K/V as in an engine: permanent arrays, and fences that order writes and reads."""

    def __init__(
        self, case: Case, num_blocks: int, tiles: Iterator[Tiles], splits: Iterator[Splits]
    ) -> None:
        self.case = case
        self.tiles, self.splits = tiles, splits  # of each attention
        self.arrays = contents(case, num_blocks)
        self.fences: Sequence[mx.array] = ()

    def plan(self, step: Step) -> AttentionPlan:
        layout = step.layout
        return paged_attention.plan(
            layout.query_start_loc_np,
            layout.seq_lens_np,
            layout.block_tables_np,
            self.case.shape,
            self.case.window,
            next(self.tiles),
            splits=next(self.splits),
            block_size=layout.block_size,
            extent=self.case.extent,
        )

    def write(self, step: Step, slots: mx.array | None = None) -> mx.array:
        keys, values, key_scales, value_scales = self.arrays
        if slots is None:
            slots = mx.array(step.layout.slot_mapping_np)
        fence = kv_write.write(
            step.keys,
            step.values,
            slots,
            keys,
            values,
            after=self.fences,
            key_scales=key_scales,
            value_scales=value_scales,
        )
        self.fences = [fence]
        return fence


def _rotate(pool: _Pool, step: Step) -> list[mx.array]:
    keys, values, key_scales, value_scales = pool.arrays
    rotation, layout = rotation_of(pool.case), step.layout
    kind, tails, of_queries = rotation.kind, None, step.queries
    rows = step.keys
    if kind.first:
        rows, tails = mx.split(rows, [kind.first], axis=-1)
    rotated, fence = kv_write.rotate_and_write(
        rows,
        step.values,
        mx.array(layout.slot_mapping_np),
        keys,
        values,
        after=pool.fences,
        key_scales=key_scales,
        value_scales=value_scales,
        queries=None if kind.first else of_queries,
        positions=positions_of(step),
        rotation=rotation,
        tails=tails,
    )
    pool.fences = [fence]
    return [] if rotated is None else [rotated]


def rotation_of(case: Case) -> Rotation:
    """Returns a rotation of the case's kind with Llama 2's base; explicit frequencies times 4."""
    kind, base = case.rotation, 10000.0
    assert kind is not None
    if not kind.listed:
        return Rotation(kind, 1.0, base)
    exponents = np.arange(0, kind.dims, 2) / kind.dims
    return Rotation(kind, 1.0, None, mx.array((4 * base**exponents).astype(np.float32)))


def positions_of(step: Step) -> mx.array:
    """Returns [T] int32, the last positions of each request."""
    lens = np.diff(step.layout.query_start_loc_np)
    rows = zip(step.layout.seq_lens_np, lens, strict=True)
    ranges = [np.arange(length - query, length) for length, query in rows]
    return mx.array(np.concatenate(ranges).astype(np.int32))


def _only_write(pool: _Pool, step: Step) -> list[mx.array]:
    pool.write(step)
    return []


def _gather(pool: _Pool, step: Step) -> list[mx.array]:
    table, written = mx.array(step.layout.block_tables_np), pool.write(step)
    keys, values, key_scales, value_scales = pool.arrays
    gather = functools.partial(kv_gather.gather, after=[written], bounds=bounds(step.layout))
    contexts = [gather(keys, table, pool.case.dtype, scales=key_scales)]
    if values is not None:
        contexts.append(gather(values, table, pool.case.dtype, scales=value_scales))
    pool.fences = [fence for _, fence in contexts]
    return [context for context, _ in contexts]


def bounds(layout: RaggedLayout) -> mx.array:
    """Returns [R, 2] int32 bounds for `gather` that leave out each request's first three tokens."""
    lens_np = layout.seq_lens_np.astype(np.int32)
    return mx.array(np.stack([np.full_like(lens_np, 3), lens_np], axis=1))


def _move_blocks(pool: _Pool, step: Step) -> list[mx.array]:
    written = pool.write(step)
    arrays = [array for array in pool.arrays if array is not None]
    sources, targets, cleared = moves(step)
    copied = kv_blocks.copy(arrays, sources, targets, after=[written])
    pool.fences = [kv_blocks.zero(arrays, cleared, after=[copied])]
    return []


def moves(step: Step) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns blocks to copy, their targets, and a block to clear."""
    return step.blocks_np[:2], step.blocks_np[2:4], step.blocks_np[4:5]


def _move_states(pool: _Pool, step: Step) -> list[mx.array]:
    written = pool.write(step)
    arrays = elements(pool.arrays)
    sources, targets, _ = moves(step)
    states, read = kv_states.read(arrays, mx.array(sources), state_width(arrays), after=[written])
    pool.fences = [kv_states.write(arrays, targets, states, after=[read])]
    return []


def elements(pools: Pools) -> list[mx.array]:
    """Returns the arrays that states lie in: K, and V if any."""
    return [pools.keys] if pools.values is None else [pools.keys, pools.values]


def state_width(arrays: Sequence[mx.array]) -> int:
    """Returns the elements of a test state: 3/4 of a block, so that it extends into V if any."""
    return sum(map(block_elements, arrays)) * 3 // 4


def _attend(pool: _Pool, step: Step) -> list[mx.array]:
    return [_attend_by(pool.plan(step), pool, step, pool.write(step))]


def _attend_gathered(pool: _Pool, step: Step) -> list[mx.array]:
    """Attends with MLX, as for prompts."""
    layout, case = step.layout, pool.case
    plan = prompts.plan(
        layout.query_start_loc_np,
        layout.seq_lens_np,
        layout.block_tables_np,
        layout.block_size,
        case.shape,
        case.window,
        force_fused=False if is_plain(case.shape, case.dtype, case.softcap) else None,
    )
    written = pool.write(step)
    keys, values, key_scales, value_scales = pool.arrays
    out, pool.fences = prompts.run(
        *(plan, step.queries, keys, keys if values is None else values, written),
        *(score_scale(case), case.softcap, step.sinks, key_scales, value_scales),
    )
    return [out]


def _attend_by(plan: AttentionPlan, pool: _Pool, step: Step, written: mx.array) -> mx.array:
    keys, values, key_scales, value_scales = pool.arrays
    out, pool.fences = paged_attention.run(
        plan,
        step.queries,
        keys,
        keys if values is None else values,
        after=written,
        scale=score_scale(pool.case),
        softcap=pool.case.softcap,
        sinks=step.sinks,
        key_scales=key_scales,
        value_scales=key_scales if values is None else value_scales,
        bias=step.bias,
    )
    return out


def _attend_in_graph(pool: _Pool, layers: Sequence[Step]) -> list[list[mx.array]]:
    """Returns each layer's output, from a graph that MLX traced and rebuilds."""
    slots = [mx.array(step.layout.slot_mapping_np) for step in layers]
    parts = tuple(zip(layers, map(pool.plan, layers), slots, strict=True)), pool.arrays
    given = [merged(pool.fences)]
    all_else(parts, given)

    def forward(arrays: list[mx.array]) -> list[mx.array]:
        left = iter(arrays)
        traced = copy.copy(pool)
        traced.fences = [next(left)]
        described, held = with_arrays(parts, left)
        traced.arrays = Pools._make(held)
        outputs = [
            _attend_by(plan, traced, step, traced.write(step, slot_mapping))
            for step, plan, slot_mapping in described
        ]
        return [*outputs, *traced.fences]

    # Kernels of other compilers cannot be traced, so they are called directly.
    found = (mx.compile(forward) if kernel.in_graphs() else forward)(given)
    pool.fences = found[len(layers) :]
    return [[output] for output in found[: len(layers)]]


def score_scale(case: Case) -> float:
    return float(case.shape.head_size**-0.5)


_USES: dict[str, Callable[[_Pool, Step], list[mx.array]]] = {
    "kv_write": _only_write,
    "kv_gather": _gather,
    "kv_blocks": _move_blocks,
    "kv_states": _move_states,
    "decode": _attend,
    "prefill": _attend,
    "reduce": _attend,
    "rotation": _rotate,
    "gathered": _attend_gathered,
}


def _tiles(check: Check, tiles: Tiles) -> Iterator[Tiles]:
    """Yields the tiles for each attention call: the checked size, or for `reduce` each in turn."""
    # All sizes, as a model's layers have.
    if check.kernel == "graph":
        yield from itertools.repeat(tiles)
    if check.kernel == "reduce":
        sizes = [(True, rows) for rows in tiles.decode] + [(False, rows) for rows in tiles.prefill]
    else:
        sizes = [(check.kernel == "decode", check.rows or 0)]
    # Contexts are split, and their common prefixes shared, only for `reduce`, and for `graph` if
    # `reduce` passed: so a failure of splitting fails no other check.
    split = check.kernel == "reduce"
    for decode, rows in itertools.cycle(sizes):
        yield replace(tiles.only(decode, rows), split=split, shared=0, wide=check.wide)


def _splits(check: Check, tiles: Tiles) -> Iterator[Splits]:
    """Yields splits that do not depend on the machine; `reduce` joins with 1 or 8 simdgroups."""
    # Each number of simdgroups runs with all sizes of tiles.
    sizes = len(tiles.decode) + len(tiles.prefill) or 1  # none if only MLX attends
    for walkers in itertools.cycle((1, WALKS) if check.kernel == "reduce" else (None,)):
        yield from itertools.repeat(replace(ALWAYS, joined_by=walkers), sizes)


def play(
    case: Case, check: Check, played: Sequence[Step], tiles: Tiles
) -> tuple[list[list[mx.array]], Pools]:
    """Runs one kernel in each step; returns each step's results, and the final pool's arrays."""
    chosen = _tiles(check, tiles), _splits(check, tiles)
    pool = _Pool(case, len(played[0].blocks_np), *chosen)
    load = mx.zeros((_LOAD, _LOAD) if mx.default_device() == mx.Device(mx.gpu) else (1, 1))
    results: list[list[mx.array]] = []
    waiting: list[mx.array] = []
    for first in range(0, len(played), LAYERS):
        layers = played[first : first + LAYERS]
        if check.kernel == "graph":
            reads = _attend_in_graph(pool, layers)
        else:
            reads = [_USES[check.kernel](pool, step) for step in layers]
        load = load @ load  # keeps the device busy, so that dispatches overlap
        queued = [load, *pool.fences, *(array for read in reads for array in read)]
        mx.async_eval(queued)
        mx.eval(waiting)
        waiting = queued
        results += reads
    mx.eval(waiting)
    return results, pool.arrays
