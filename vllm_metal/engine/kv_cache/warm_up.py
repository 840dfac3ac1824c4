# SPDX-License-Identifier: Apache-2.0
"""Compiles what serves a model before its first request, by launching each pipeline once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx
from tqdm import tqdm

from vllm_metal.engine.kv_cache.specs import host_of_states

if TYPE_CHECKING:
    from vllm_metal.engine.kv_cache.layer_cache import KVBackend
    from vllm_metal.engine.kv_cache.stateful_layer import StatefulLayer


def compile_kernels(
    backend: KVBackend,
    layers: Sequence[StatefulLayer],
    dtype: mx.Dtype,
    pool_dtype: mx.Dtype,
    block_size: int,
) -> None:
    """Shows its progress; does nothing for layers without kernels.

    Args:
        backend: that will serve.
        layers: all that the pool is for.
        dtype: of their queries, keys and values.
        pool_dtype: of the pool's elements.
        block_size: tokens of a block.
    """
    host = host_of_states(layers, block_size, pool_dtype)
    launches: dict[Hashable, Callable[[], mx.array]] = {}
    for layer in dict.fromkeys(replace(layer, name="") for layer in layers):
        for key, launch in layer.trials(dtype, pool_dtype, block_size, backend, host):
            launches.setdefault(key, launch)
    if not launches:
        return
    for launch in tqdm(launches.values(), desc="Compiling Metal kernels"):
        mx.eval(launch())
