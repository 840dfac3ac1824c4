# SPDX-License-Identifier: Apache-2.0
"""Creates the steps to run: their requests, blocks and contents."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from metal_kernels.kv_gather import reference as gather_reference
from metal_kernels.kv_write import reference as write_reference
from metal_kernels.kv_write.reference import Pools
from metal_kernels.layout import RaggedLayout
from metal_kernels.op_common import QUANTIZED_DTYPES
from metal_kernels.paged_attention import Tiles
from metal_kernels.selfcheck.case import KERNELS, Case

_LONG = 600  # positions of a context that is split
_SPARE_BLOCKS = 3


@dataclass(frozen=True)
class Step:
    """The inputs of one layer in one step."""

    layout: RaggedLayout
    blocks_np: np.ndarray  # [B] int32, all of the pool in the order of allocation
    queries: mx.array  # [T, H, D]
    keys: mx.array  # [T, Hkv, D]
    values: mx.array | None  # [T, Hkv, D]; None: the keys hold them
    sinks: mx.array | None  # [H]
    bias: mx.array | None = None  # [T, H, extent]


def layouts(case: Case, kernel: str, count: int) -> list[tuple[RaggedLayout, np.ndarray]]:
    """Returns layouts of steps, each with the pool's blocks in the order of allocation.

    Each step allocates the pool's few blocks anew, so it overwrites blocks that earlier steps read.
    The context before a request's rows is whatever earlier steps left in its blocks.
    """
    rng = np.random.default_rng(KERNELS.index(kernel))
    batches = [_requests(case, kernel, index) for index in range(count)]
    common = [_common(case, kernel, index) for index in range(count)]
    most = max(sum(-(-length // case.block_size) for _, length in batch) for batch in batches)
    orders = [rng.permutation(most + _SPARE_BLOCKS).astype(np.int32) for _ in batches]
    return [
        (_layout(case, batch, blocks, num_common), blocks)
        for batch, blocks, num_common in zip(batches, orders, common, strict=True)
    ]


def _requests(case: Case, kernel: str, step: int) -> list[tuple[int, int]]:
    """Returns each request's query rows and context; a few steps cover tiles of every size."""
    group, block = case.shape.group, case.block_size
    verified = range(1, max(1, case.shape.decode_rows // group) + 1)  # rows that verify drafts
    chunks = [max(1, rows // group) for rows in (64, 8, 16, 32) if rows <= case.shape.tile_rows]
    verify, chunk = verified[(step + 1) % len(verified)], chunks[step % len(chunks)]
    if kernel == "reduce":
        queries = [*verified[:1], *chunks, *verified[1:]]
        turn = _turn(case, step)
        query = queries[turn % len(queries)]
        requests = [(query, _LONG + query + 7 * (step % 8)), (1, block + 3)]
        return [*requests, (1, _LONG // 2)] if _common(case, kernel, step) else requests
    if kernel == "gathered":
        rows, before = 64 + 5 * (step % 7), (block + 3) * (step % 4)
        return [(rows, before + rows), (rows + 1, 2 * block + rows)]
    if kernel == "prefill":
        if step % 4 == 3:  # a long chunk among decodes
            long = case.shape.tile_rows // group + 3
            return [(1, 2 * block + 5), (long, long + block + 3), (verify, 3 * block)]
        return [(chunk, chunk + 2 * block + step % block), (1, 2 * block + 1)]
    return [(verify, 2 * block + 2 + 3 * step % block), (1, 3 * block), (verify, block + verify)]


def _turn(case: Case, step: int) -> int:
    """Returns how often the steps before `step` have gone through all sizes of tiles."""
    sizes = Tiles.for_layer(case.shape, case.window)
    return step // (len(sizes.decode) + len(sizes.prefill))


def _common(case: Case, kernel: str, step: int) -> int:
    """Returns the number of blocks in the common prefix of the first and the last request."""
    shares = kernel == "reduce" and _turn(case, step) % 2 == 0
    return (1 + step % 2) * (_LONG // 4 // case.block_size) if shares else 0


def _layout(
    case: Case, requests: list[tuple[int, int]], blocks: np.ndarray, common: int = 0
) -> RaggedLayout:
    query_lens, seq_lens = (np.array(part, np.int32) for part in zip(*requests, strict=True))
    counts = -(-seq_lens // case.block_size)
    tables = np.zeros((len(requests), counts.max()), np.int32)
    slots = []
    for row, (query, length) in enumerate(requests):
        first = int(counts[:row].sum())
        tables[row, : counts[row]] = blocks[first : first + counts[row]]
        if row == len(requests) - 1:
            tables[row, :common] = tables[0, :common]
        positions = np.arange(length - query, length)
        block = tables[row, positions // case.block_size]
        slots.append(block * case.block_size + positions % case.block_size)
    return RaggedLayout(
        query_start_loc_np=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        seq_lens_np=seq_lens,
        block_tables_np=tables,
        slot_mapping_np=np.concatenate(slots).astype(np.int32),
        block_size=case.block_size,
    )


def contents(case: Case, num_blocks: int) -> Pools:
    """Creates the pool's contents before the first step."""
    rng = np.random.default_rng(0)
    shape = (case.shape.num_kv_heads, num_blocks, case.block_size)
    rows = _rows(rng, (*shape, case.shape.head_size), case, True)
    keys, key_scales = write_reference.encode(rows, case.cache_dtype)
    if case.shape.latent:
        return Pools(keys, None, key_scales, None)
    rows = _rows(rng, (*shape, case.shape.value_size), case, True)
    values, value_scales = write_reference.encode(rows, case.cache_dtype)
    return Pools(keys, values, key_scales, value_scales)


def steps(case: Case, kernel: str, count: int) -> list[Step]:
    """Creates steps of rows that a quantized cache holds exactly, except to check kv_write."""
    rng = np.random.default_rng(1 + KERNELS.index(kernel))
    exact = kernel != "kv_write"
    played = []
    for index, (layout, blocks) in enumerate(layouts(case, kernel, count)):
        size, value_size = case.shape.head_size, case.shape.value_size
        rows = (len(layout.slot_mapping_np), case.shape.num_kv_heads)
        queries = (rows[0], case.shape.num_heads, size)
        sinks = mx.array(rng.normal(size=case.shape.num_heads).astype(np.float32))
        played.append(
            Step(
                layout=layout,
                blocks_np=blocks,
                queries=mx.array(rng.normal(size=queries).astype(np.float32)).astype(case.dtype),
                keys=_rows(rng, (*rows, size), case, exact),
                values=None if case.shape.latent else _rows(rng, (*rows, value_size), case, exact),
                sinks=sinks.astype(case.dtype) if case.sinks and index % 2 else None,
                bias=_bias(rng, rows[0], case),
            )
        )
    return played


def _bias(rng: np.random.Generator, num_rows: int, case: Case) -> mx.array | None:
    if case.extent is None:
        return None
    shape = num_rows, case.shape.num_heads, case.extent
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(case.dtype)


def _rows(rng: np.random.Generator, shape: tuple[int, ...], case: Case, exact: bool) -> mx.array:
    """Creates [..., D] rows; `exact` ones are quantized values times a power of two."""
    rows = mx.array(rng.normal(size=shape).astype(np.float32))
    if exact and case.cache_dtype in QUANTIZED_DTYPES:
        quantized, _ = write_reference.encode(rows, case.cache_dtype)
        # All dtypes hold these products exactly.
        step = 2.0**-7 if case.cache_dtype == mx.uint8 else 2.0**-5
        rows = gather_reference.decode(quantized, mx.full(shape[:-1], step))
    return rows.astype(case.dtype)
