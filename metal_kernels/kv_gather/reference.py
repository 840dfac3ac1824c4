# SPDX-License-Identifier: Apache-2.0
"""kv_gather in MLX's operations."""

import mlx.core as mx


def gather(
    pool: mx.array,
    block_table: mx.array,
    dtype: mx.Dtype,
    scales: mx.array | None = None,
    bounds: mx.array | None = None,
    heads: tuple[int, int] | None = None,
) -> mx.array:
    """Returns the same context as `kv_gather.gather`."""
    n, w = block_table.shape
    if heads is not None:
        some = slice(heads[0], sum(heads))
        pool, scales = pool[some], None if scales is None else scales[some]
    num_heads, num_blocks, block_size, head_size = pool.shape
    inside = (block_table >= 0) & (block_table < num_blocks)
    blocks = mx.where(inside, block_table, 0)
    values = decode(pool[:, blocks], None if scales is None else scales[:, blocks])
    read = mx.broadcast_to(inside[..., None], (n, w, block_size)).reshape(n, -1)
    if bounds is not None:
        slots = mx.arange(w * block_size)
        read = read & (slots >= bounds[:, :1]) & (slots < bounds[:, 1:])
    values = values.reshape(num_heads, n, w * block_size, head_size)
    return mx.where(read[..., None], values, 0.0).astype(dtype)


def decode(elements: mx.array, scales: mx.array | None = None) -> mx.array:
    """Decodes [..., D] pool elements to float32, with [...] scales if they are quantized."""
    if scales is None:
        return elements.astype(mx.float32)
    factors = scales.astype(mx.float32)[..., None]
    if elements.dtype == mx.uint8:
        return mx.from_fp8(elements, dtype=mx.float32) * factors
    return elements.astype(mx.float32) * factors
