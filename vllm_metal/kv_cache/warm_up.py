# SPDX-License-Identifier: Apache-2.0
"""Compiles what serves a model before its first request, by launching each pipeline once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from metal_kernels.paged_attention import AttentionShape
from vllm_metal.kv_cache.layer_cache import LayerKVCache

if TYPE_CHECKING:
    from vllm_metal.attention.layers import AttentionLayer

_BLOCKS = 8  # of 16 positions at least: enough for the rows of the largest tile


def compile_kernels(
    kv_cache_type: type[LayerKVCache],
    layers: Sequence[AttentionLayer],
    dtype: mx.Dtype,
    pool_dtype: mx.Dtype,
    block_size: int,
) -> None:
    """Says how far it is; does nothing for kv_caches without kernels.

    Args:
        kv_cache_type: that will serve.
        layers: all that the pool is for.
        dtype: of their queries, keys and values.
        pool_dtype: of the pool's elements.
        block_size: tokens of a block.
    """
    launches = list(_launches(kv_cache_type, layers, dtype, pool_dtype, block_size))
    if not launches:
        return
    for launch in tqdm(launches, desc="Compiling Metal kernels"):
        mx.eval(launch())


def _launches(
    kv_cache_type: type[LayerKVCache],
    layers: Sequence[AttentionLayer],
    dtype: mx.Dtype,
    pool_dtype: mx.Dtype,
    block_size: int,
) -> Iterator[Callable[[], mx.array]]:
    """One for each pipeline of attention; the first of a kv_cache is for its other kernels, too."""
    kv_caches: dict[tuple[int, int], LayerKVCache] = {}
    launched = set()
    for shape, window, sinks in dict.fromkeys((x.shape, x.window, x.sinks) for x in layers):
        for trial in kv_cache_type.trials(shape, window):
            heads = (shape.num_kv_heads, shape.head_size)
            fresh = heads not in kv_caches
            if fresh:
                kv_caches[heads] = kv_cache_type(_BLOCKS, block_size, *heads, pool_dtype)
            pipeline = (shape, sinks, trial.pipeline)
            if pipeline not in launched:
                launched.add(pipeline)
                yield partial(_launch, kv_caches[heads], trial, shape, dtype, sinks, fresh)


def _launch(
    kv_cache: LayerKVCache,
    trial: Any,
    shape: AttentionShape,
    dtype: mx.Dtype,
    sinks: mx.Dtype | None,
    whole_blocks: bool,
) -> mx.array:
    if whole_blocks:
        kv_cache.clear_blocks(np.array([1], np.int32))
        kv_cache.copy_blocks(np.array([0], np.int32), np.array([1], np.int32))
    fresh = mx.zeros((trial.num_tokens, shape.num_kv_heads, shape.head_size), dtype)
    queries = mx.zeros((trial.num_tokens, shape.num_heads, shape.head_size), dtype)
    keys, values = kv_cache.write(trial, fresh, fresh)
    logits = None if sinks is None else mx.zeros(shape.num_heads, sinks)
    return kv_cache.attend(trial, queries, keys, values, 1.0, logits)
