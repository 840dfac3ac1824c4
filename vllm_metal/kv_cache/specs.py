# SPDX-License-Identifier: Apache-2.0
"""Layers of the model as vLLM's KV cache specs, and vLLM's placement as pool kv_caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import mlx.core as mx
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    SlidingWindowSpec,
)

from vllm_metal.kv_cache.layer_cache import LayerKVCache, row_bytes

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_metal.attention.layers import AttentionLayer

_AS_VLLM_HAS_IT = {
    mx.float32: (torch.float32, KVQuantMode.NONE),
    mx.float16: (torch.float16, KVQuantMode.NONE),
    mx.bfloat16: (torch.bfloat16, KVQuantMode.NONE),
    mx.uint8: (torch.float8_e4m3fn, KVQuantMode.FP8_PER_TOKEN_HEAD),
    mx.int8: (torch.int8, KVQuantMode.INT8_PER_TOKEN_HEAD),
}


def kv_cache_specs(
    layers: Sequence[AttentionLayer], block_size: int, dtype: mx.Dtype
) -> dict[str, KVCacheSpec]:
    """One spec a layer, by layer name; vLLM groups them and hands each group its blocks.

    Layers of one window, or of none, form one group whatever their shapes. Groups share memory,
    which takes layers of one shape: where some differ, as those of a draft model do from the target
    windows are not made use of, and all layers form one group that keeps the whole context.

    Args:
        layers: of all networks over the pool.
        block_size: tokens of a block.
        dtype: of the pool's elements.
    """
    shapes = {(layer.num_kv_heads, layer.head_size) for layer in layers}
    windows = {layer.window for layer in layers}
    one_group = len(shapes) > 1 and len(windows) > 1
    torch_dtype, mode = _AS_VLLM_HAS_IT[dtype]

    def spec(layer: AttentionLayer) -> KVCacheSpec:
        family: Callable[..., KVCacheSpec] = FullAttentionSpec
        if layer.window is not None and not one_group:
            family = partial(SlidingWindowSpec, sliding_window=layer.window)
        return family(
            block_size=block_size,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            dtype=torch_dtype,
            kv_quant_mode=mode,
            state_content_bytes=2 * row_bytes(layer.head_size, dtype),  # K and V, with their scales
        )

    return {layer.name: spec(layer) for layer in layers}


def allocate_kv_caches(
    config: KVCacheConfig,
    layers: Sequence[AttentionLayer],
    block_size: int,
    dtype: mx.Dtype,
    kv_cache_type: type[LayerKVCache],
) -> dict[str, LayerKVCache]:
    """The pool: a kv_cache for each layer name, the same one for layers that vLLM overlays.

    vLLM places each layer at a byte offset; layers of different groups at one offset share memory,
    since a block belongs to one group at a time.

    Raises:
        NotImplementedError: layers that share memory differ in K/V shape.
    """
    by_name = {layer.name: layer for layer in layers}
    kv_caches: dict[int, LayerKVCache] = {}
    shapes: dict[int, tuple[int, int]] = {}
    placed: dict[str, LayerKVCache] = {}
    for tensor in config.kv_cache_tensors:
        for index, name in enumerate(tensor.layers):
            offset = tensor.offset + index * tensor.layer_stride
            shape = (by_name[name].num_kv_heads, by_name[name].head_size)
            if offset not in kv_caches:
                kv_caches[offset] = kv_cache_type(config.num_blocks, block_size, *shape, dtype)
                shapes[offset] = shape
            elif shapes[offset] != shape:
                raise NotImplementedError(
                    f"{name} has K/V of {shape} (heads, head size) where another layer of its "
                    f"memory has {shapes[offset]}; use --disable-hybrid-kv-cache-manager"
                )
            placed[name] = kv_caches[offset]
    return placed
