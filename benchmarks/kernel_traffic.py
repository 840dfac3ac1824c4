# SPDX-License-Identifier: Apache-2.0
"""Counts what the attention kernels load, in the interpreter, and compares it with the minimum.

Prints the table of docs/kernels.md; needs no GPU: `python benchmarks/kernel_traffic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from metal_interpreter import Checker, Dispatch

from metal_kernels import kernel, kv_write, paged_attention
from metal_kernels.paged_attention import AttentionShape

LINE = 128  # bytes, an Apple GPU's smallest transfer
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Workload:
    """A step of identical requests."""

    name: str
    shape: AttentionShape
    batch: int
    rows: int  # per request in this step
    context: int  # per request, including this step's rows
    dtype: mx.Dtype = mx.float16
    common: int = 0  # positions of a prefix shared by all requests, in whole blocks


@dataclass(frozen=True)
class Figures:
    """Counters of one layer in one step."""

    loaded: int  # lines of K and V, each counted once per threadgroup
    least: int  # lines of K and V, each counted once
    dispatches: tuple[Dispatch, ...]  # write and attention

    @property
    def ratio(self) -> float:
        return self.loaded / self.least


def measure(work: Workload) -> Figures:
    """Runs one layer of the step in the interpreter: the write, then attention."""
    shape, num_tokens = work.shape, work.batch * work.rows
    per_request = -(-work.context // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(work.batch * per_request).astype(np.int32)
    tables = tables.reshape(work.batch, per_request)
    tables[:, : work.common // BLOCK_SIZE] = tables[0, : work.common // BLOCK_SIZE]
    positions = np.arange(work.context - work.rows, work.context)
    slots = (tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).ravel()
    pool_shape = (shape.num_kv_heads, tables.size, BLOCK_SIZE, shape.head_size)
    pools = [mx.zeros(pool_shape, work.dtype) for _ in range(1 if shape.latent else 2)]
    fresh = mx.zeros((num_tokens, shape.num_kv_heads, shape.head_size), work.dtype)
    queries = mx.zeros((num_tokens, shape.num_heads, shape.head_size), work.dtype)
    starts = np.arange(work.batch + 1, dtype=np.int32) * work.rows
    lens = np.full(work.batch, work.context, np.int32)
    plan = paged_attention.plan(starts, lens, tables, shape, block_size=BLOCK_SIZE)
    checker = Checker()
    with kernel.using(checker.metal_kernel):
        values = None if shape.latent else fresh
        value_pool = None if shape.latent else pools[1]
        slot_mapping = mx.array(np.pad(slots, (0, max(0, 8 - len(slots))), constant_values=-1))
        token = kv_write.write(fresh, values, slot_mapping, pools[0], value_pool)
        paged_attention.run(plan, queries, pools[0], pools[-1], token, scale=1.0)
    loaded = sum(
        dispatch.buffers[name].unique_lines_read_by_threadgroup
        for dispatch in checker.dispatches
        if dispatch.kernel in ("decode", "prefill")
        for name in ("key_pool", "value_pool")
    )
    positions = work.common + work.batch * (work.context - work.common)
    per_head = -(-positions * shape.head_size * work.dtype.size // LINE)
    least = shape.num_kv_heads * per_head * len(pools)
    return Figures(loaded, least, tuple(checker.dispatches))


def _gqa(group: int, kv_heads: int = 1, head_size: int = 128) -> AttentionShape:
    return AttentionShape(group * kv_heads, kv_heads, head_size, head_size)


WORKLOADS: Sequence[Workload] = (
    *(Workload(f"decode, {g} query heads a K/V head", _gqa(g), 4, 1, 1000) for g in (1, 4, 8)),
    Workload("decode, 4 heads", _gqa(4), 1, 1, 200),
    Workload("decode, 4 heads", _gqa(4), 1, 1, 8192),
    Workload("decode, 4 heads", _gqa(4), 32, 1, 300),
    *(Workload(f"verify 5 rows, {g} heads", _gqa(g), 2, 5, 1000) for g in (1, 4, 8)),
    Workload("decode, latent, 16 heads", AttentionShape(16, 1, 576, 512), 2, 1, 500),
    Workload("decode, 4 heads, 960 in common", _gqa(4), 8, 1, 1000, common=960),
    Workload("decode, 8 heads, 1920 in common", _gqa(8), 4, 1, 2000, common=1920),
    Workload("prefill 64 rows, 4 heads", _gqa(4), 1, 64, 64),
    Workload("prefill 256 rows, 4 heads", _gqa(4), 1, 256, 256),
    Workload("prefill 64 rows behind 448, 4 heads", _gqa(4), 1, 64, 512),
)


def main() -> None:
    print("| requests × context | | loaded | dispatches | threadgroup memory | barriers |")
    print("| --- | --- | ---: | --- | ---: | ---: |")
    for work in WORKLOADS:
        figures = measure(work)
        kernels = " + ".join(dispatch.kernel for dispatch in figures.dispatches)
        attend = next(d for d in figures.dispatches if d.kernel in ("decode", "prefill"))
        print(
            f"| {work.batch} × {work.context} | {work.name} | {figures.ratio:.2f} | {kernels} "
            f"| {attend.threadgroup_bytes / 1024:.1f} KB | {attend.barriers_per_threadgroup:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
