# SPDX-License-Identifier: Apache-2.0
"""Compiles a model's Metal kernels before its first request, by launching each pipeline once."""

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
    """Compiles all kernels of the pool's layers, with a progress bar; no-op if there are none.

    `dtype` is that of queries, keys and values, `pool_dtype` that of the pool's elements.
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
