# SPDX-License-Identifier: Apache-2.0
"""Attention kernels over the pool: run() launches a plan's dispatches for one layer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np

from metal_kernels.kernel import MIN_ELEMENTS, load
from metal_kernels.layout import BLOCK_SIZES
from metal_kernels.op_common import (
    FENCE_DTYPE,
    FENCE_SHAPE,
    NO_SCALES,
    QUANTIZED_DTYPES,
    VALUE_DTYPES,
    check_scales,
    padded,
)
from metal_kernels.pace import Pace
from metal_kernels.paged_attention.dispatch import Dispatch
from metal_kernels.paged_attention.plan import AttentionPlan
from metal_kernels.paged_attention.shape import LATENT_SIZES, AttentionShape
from metal_kernels.paged_attention.splits import WALKS

HEAD_SIZES = (64, 80, 96, 128, 192, 256, 512)
#: Sizes of keys and values that differ: MLA without absorption, MiMo; MiniCPM3.
SIZES_APART = ((192, 128), (96, 64))

_LOG2_E = math.log2(math.e)
_LOWEST = -3.0e38  # as in numeric.metal

_NO_BIAS = {dtype: mx.array([0.0] * MIN_ELEMENTS, dtype) for dtype in VALUE_DTYPES}

_INPUTS = (
    "queries",
    "key_pool",
    "value_pool",
    "key_scales",
    "value_scales",
    "block_tables",
    "requests",
    "tiles",
    "scoring",
    "sinks",
    "bias",
    "after",
)
_FOLDER = Path(__file__).parent
_SHARED = ("numeric.metal", "attention.metal")
_decode = load(
    _FOLDER / "decode.metal",
    _INPUTS,
    ("out", "out_stats", "fence"),
    (*_SHARED, "fragments.metal"),
)
_prefill = load(_FOLDER / "prefill.metal", _INPUTS, ("out", "out_stats", "fence"), _SHARED)
_PARTS = ("parts", "stats", "shared_parts", "shared_stats", "rows")
_reduce = load(_FOLDER / "reduce.metal", _PARTS, ("out",), _SHARED)


def run(
    plan: AttentionPlan,
    queries: mx.array,
    key_pool: mx.array,
    value_pool: mx.array,
    after: mx.array,
    scale: float,
    softcap: float | None = None,
    sinks: mx.array | None = None,
    key_scales: mx.array | None = None,
    value_scales: mx.array | None = None,
    pace: Pace | None = None,
    bias: mx.array | None = None,
) -> tuple[mx.array, list[mx.array]]:
    """Attends for one layer, once this step's K/V are in the pool.

    Args:
        plan: a plan for this layer's block table, shape and window.
        queries: [T, H, D], float16, bfloat16 or float32.
        key_pool: [Hkv, B, block_size, D], the dtype of `queries`, uint8 (fp8 e4m3) or int8.
        value_pool: [Hkv, B, block_size, DV], the dtype of `key_pool`; for latents `key_pool`, whose
            rows begin with the DV elements of a value.
        after: [8] uint32, fence of the write to wait for.
        scale: factor on the scores.
        softcap: scores become softcap * tanh(score / softcap).
        sinks: [H], a learned logit per head that only takes part in the softmax.
        key_scales: [Hkv, B, block_size] bfloat16, for a quantized pool.
        value_scales: like `key_scales`, for values.
        pace: ends command buffers between long dispatches; None: only MLX ends them.
        bias: [T, H, extent], the dtype of `queries`, added to the score of the key at distance d
            before the query's own position, for d < extent, the plan's. Not with a soft cap.

    Returns:
        [T, H, DV], the dtype of `queries`, and a fence of each dispatch that reads the pool.

    Raises:
        ValueError: an argument's shape or dtype is invalid.
    """
    _check(plan, queries, key_pool, value_pool, sinks, key_scales, value_scales)
    _check_bias(plan, queries, bias, softcap)
    biases = _NO_BIAS[queries.dtype] if bias is None else padded(bias.flatten(), fill=0)
    sinks = _no_sinks(queries.shape[1]) if sinks is None else padded(sinks, fill=0)
    key_scales = NO_SCALES if key_scales is None else key_scales
    value_scales = NO_SCALES if value_scales is None else value_scales
    pools = key_pool, value_pool, key_scales, value_scales
    outputs: list[mx.array] = []
    fences: list[mx.array] = []
    for dispatch in plan.dispatches:
        if pace is not None:
            # Wait for all outputs so far, as a layer's dispatches do not depend on each other.
            work = sum(launch.work for launch in dispatch.launches)
            pace.before(work, *fences[::-1], *outputs[::-1])
        parts = []
        for launch in dispatch.launches:
            # All rows see a whole shared prefix, which is listed.
            visible = launch.window, launch.listed, plan.bidirectional and not launch.listed
            scoring = _scoring(scale, softcap, *visible, plan.extent or 0)
            lists = plan.block_tables, launch.requests, launch.tiles
            buffers = [queries, *pools, *lists, scoring, sinks, biases, after]
            out, stats, fence = _launch(plan, launch, buffers, softcap is not None)
            parts.append((out, stats))
            fences.append(fence)
        joined = parts[0][0]
        if dispatch.splits is not None:
            joined = _join(plan.shape, dispatch, dispatch.splits, parts, queries.dtype)
        outputs.append(joined)
    merged = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)
    return merged if plan.order is None else merged[plan.order], fences


def _launch(
    plan: AttentionPlan, dispatch: Dispatch, buffers: list[mx.array], capped: bool
) -> list[mx.array]:
    """Launches a dispatch; returns its rows, maxima and sums if split into parts, and fence."""
    queries, key_pool = buffers[:2]
    shape, split = plan.shape, dispatch.part_rows > 0
    kernel, tiling, simdgroups = (_decode_tiling if dispatch.decode else _prefill_tiling)(
        shape, dispatch, queries.dtype, key_pool.dtype
    )
    template = [
        ("T", queries.dtype),
        ("C", key_pool.dtype),
        ("O", mx.float32 if split else queries.dtype),
        ("D", shape.head_size),
        ("DV", shape.value_size),
        ("LATENT", shape.latent),
        ("SCALED", key_pool.dtype in QUANTIZED_DTYPES),
        ("CAPPED", capped),
        ("BIASED", plan.extent is not None),
        ("PARTIAL", split),
        *tiling.items(),
    ]
    num_rows = dispatch.part_rows if split else dispatch.num_rows
    return kernel(
        inputs=buffers,
        template=template,
        grid=(dispatch.num_tiles * simdgroups * 32, shape.num_kv_heads, 1),
        threadgroup=(simdgroups * 32, 1, 1),
        output_shapes=[
            (num_rows, shape.num_heads, shape.value_size),
            (num_rows, shape.num_heads, 2) if split else (MIN_ELEMENTS,),
            FENCE_SHAPE,
        ],
        output_dtypes=[mx.float32 if split else queries.dtype, mx.float32, FENCE_DTYPE],
    )


def _join(
    shape: AttentionShape,
    dispatch: Dispatch,
    rows: mx.array,
    parts: list[tuple[mx.array, mx.array]],
    dtype: mx.Dtype,
) -> mx.array:
    """Merges each row's partial results, also those over a shared prefix; returns [n, H, DV]."""
    # A threadgroup has a few simdgroups: those of one row, or of several independent rows.
    heads = min(shape.num_heads, 8) if dispatch.walkers == 1 else 1
    (out,) = _reduce(
        inputs=[*parts[0], *parts[-1], rows],
        template=[("T", dtype), ("DV", shape.value_size), ("WALKS", WALKS)],
        grid=(32 * dispatch.walkers, shape.num_heads, dispatch.num_rows),
        threadgroup=(32 * dispatch.walkers, heads, 1),
        output_shapes=[(dispatch.num_rows, shape.num_heads, shape.value_size)],
        output_dtypes=[dtype],
    )
    return out


_Tiling = tuple[Callable[..., list[mx.array]], dict[str, int], int]


def _decode_tiling(
    shape: AttentionShape, dispatch: Dispatch, dtype: mx.Dtype, cache_dtype: mx.Dtype
) -> _Tiling:
    """Returns the decode kernel, its template for the dispatch, and simdgroups per threadgroup."""
    # A simdgroup has 64 elements of a head, which fill its registers, or 96 of two bytes. The
    # number of walks only depends on the layer and on whether a context is whole, and so does the
    # rounding of a row's result. A part has as many walks as fit 256 threads. A whole context has
    # twice as many, for 512 threads, unless joins, which are sequential, would take more time than
    # shorter walks save, or threadgroup memory has no room for them.
    widest = 96 if cache_dtype.size == 2 and shape.head_size <= 192 else 64
    both_fit = shape.latent or cache_dtype.size == 2  # even the keys, if larger than the values
    parts = -(-(shape.value_size if both_fit else shape.head_size) // widest)
    of_parts, row_groups = _side_by_side(parts), dispatch.rows // 8
    walks = of_parts if 8 in (of_parts, parts) else 2 * of_parts
    walkers = walks if dispatch.wide else _side_by_side(row_groups * parts)
    strips = 2 if shape.latent and cache_dtype.size == 1 else 1  # a key has few bytes
    tiling = {
        "ROW_GROUPS": row_groups,
        "SPLIT": parts,
        "WALKS": walks,
        "PART_WALKS": of_parts,
        "WALKERS": walkers,
        "STRIPS": strips,
    }
    return _decode, tiling, row_groups * parts * walkers


def _side_by_side(simdgroups: int) -> int:
    """Returns how many groups of `simdgroups` fit 256 threads, rounded down to a power of two."""
    return 1 << (8 // simdgroups).bit_length() - 1


def _prefill_tiling(
    shape: AttentionShape, dispatch: Dispatch, dtype: mx.Dtype, cache_dtype: mx.Dtype
) -> _Tiling:
    """Returns the prefill kernel, its template for the dispatch, and simdgroups per threadgroup."""
    # Registers hold some 128 elements of a row's head. With tiles of AttentionShape.tile_rows, a
    # threadgroup then has at most 256 threads. Staged rows of K or V fit 32 KB of threadgroup
    # memory together with their scores.
    row_groups, size = dispatch.rows // 8, shape.head_size
    parts = 1 if size <= 128 else 2 if size <= 256 else 4
    keys = 32 if size <= 128 else 16 if size <= 256 or dtype.size == 2 else 8
    tiling = {"ROW_GROUPS": row_groups, "SPLIT": parts, "KEYS": keys}
    return _prefill, tiling, row_groups * parts


@functools.lru_cache(maxsize=256)
def _scoring(
    scale: float,
    softcap: float | None,
    window: int,
    listed: bool,
    bidirectional: bool,
    extent: int,
) -> mx.array:
    """Packs struct Scoring of shared/attention.metal, [8] int32; the first two are floats."""
    fields = np.zeros(MIN_ELEMENTS, np.int32)
    capped = (scale * _LOG2_E, 0.0) if softcap is None else (scale / softcap, softcap * _LOG2_E)
    fields[:2] = np.array(capped, np.float32).view(np.int32)
    fields[2:6] = window, listed, bidirectional, extent
    return mx.array(fields)


@functools.lru_cache(maxsize=64)
def _no_sinks(num_heads: int) -> mx.array:
    return mx.array(np.full(max(num_heads, MIN_ELEMENTS), _LOWEST, np.float32))


def unsupported(shape: AttentionShape, dtype: mx.Dtype, block_size: int) -> str | None:
    """Returns why the kernels do not support layers of this shape; None if they do."""
    if dtype not in VALUE_DTYPES:
        return f"queries of {dtype} are not supported; expected float16, bfloat16 or float32"
    if block_size not in BLOCK_SIZES:
        return f"block_size {block_size} is not supported; choose one of {BLOCK_SIZES}"
    if shape.num_heads % shape.num_kv_heads:
        return f"{shape.num_heads} query heads do not divide among {shape.num_kv_heads} K/V heads"
    sizes = (shape.head_size, shape.value_size)
    apart = (*SIZES_APART, *LATENT_SIZES)
    if sizes[0] != sizes[1] and sizes not in apart:
        return f"keys and values of sizes {sizes} are not supported; supported: {apart}"
    if sizes[0] == sizes[1] and shape.head_size not in HEAD_SIZES:
        return f"head size {shape.head_size} is not supported; supported: {HEAD_SIZES}"
    return None


def _check(
    plan: AttentionPlan,
    queries: mx.array,
    key_pool: mx.array,
    value_pool: mx.array,
    sinks: mx.array | None,
    key_scales: mx.array | None,
    value_scales: mx.array | None,
) -> None:
    """Raises ValueError naming the first invalid argument, without waiting for the device."""
    shape = plan.shape
    if key_pool.ndim != 4:
        raise ValueError(f"key_pool: expected [Hkv, B, block_size, D], found {key_pool.shape}")
    if reason := unsupported(shape, queries.dtype, key_pool.shape[2]):
        raise ValueError(reason)
    if key_pool.dtype not in (queries.dtype, *QUANTIZED_DTYPES):
        raise ValueError(
            f"key_pool: expected {queries.dtype} (as of the queries), uint8 or int8; "
            f"found {key_pool.dtype}"
        )
    expected = (plan.num_tokens, shape.num_heads, shape.head_size)
    if queries.shape != expected:
        raise ValueError(f"queries: expected {expected} as planned, found {queries.shape}")
    if (key_pool.shape[0], key_pool.shape[3]) != (shape.num_kv_heads, shape.head_size):
        raise ValueError(
            f"key_pool: expected [{shape.num_kv_heads}, B, block_size, {shape.head_size}] as "
            f"planned, found {key_pool.shape}"
        )
    if shape.latent and value_pool is not key_pool:
        raise ValueError("value_pool: expected key_pool, whose rows begin with the values")
    size = shape.head_size if shape.latent else shape.value_size
    wanted = (*key_pool.shape[:3], size)
    if (value_pool.shape, value_pool.dtype) != (wanted, key_pool.dtype):
        raise ValueError(
            f"value_pool: expected {wanted} {key_pool.dtype} as key_pool is, "
            f"found {value_pool.shape} {value_pool.dtype}"
        )
    if sinks is not None and sinks.shape != (shape.num_heads,):
        raise ValueError(f"sinks: expected ({shape.num_heads},), found {sinks.shape}")
    check_scales("key_scales", key_scales, key_pool)
    check_scales("value_scales", value_scales, value_pool)


def _check_bias(
    plan: AttentionPlan, queries: mx.array, bias: mx.array | None, softcap: float | None
) -> None:
    """Raises ValueError for a bias other than planned, or beside a soft cap."""
    if plan.extent is None and bias is None:
        return
    expected = None
    if plan.extent is not None:
        expected = (plan.num_tokens, plan.shape.num_heads, plan.extent), queries.dtype
    found = None if bias is None else (bias.shape, bias.dtype)
    if found != expected:
        raise ValueError(f"bias: expected {expected} as planned, found {found}")
    if softcap is not None:
        raise ValueError("a relative bias is not supported beside a soft cap of scores")
