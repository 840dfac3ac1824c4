# SPDX-License-Identifier: Apache-2.0
"""Times MLX's own attention on contiguous K and V, as a yardstick for our kernels."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import mlx.core as mx

from metal_kernels.op_common import QUANTIZED_DTYPES
from metal_kernels.selfcheck.case import BACKENDS, Case

# Gathering first, as MLX would serve a pool, moves three times the bytes: our kernels beat that
# even at half their speed.

#: Besides BACKENDS; cannot serve, because a pool has K and V in blocks.
BACKEND = "contiguous"


def serves(case: Case) -> bool:
    """Returns whether MLX has an attention kernel for this case."""
    plain = case.window is None and case.softcap is None and not case.shape.latent
    return plain and case.cache_dtype not in QUANTIZED_DTYPES


def attend(
    case: Case, requests: int, query: int, keys: int, rotated: int
) -> Callable[[mx.array], list[mx.array]]:
    """Returns a `timing.Call` of MLX's attention that cycles over `rotated` bytes of K and V."""
    shape, dtype = case.shape, case.dtype
    size = 2 * requests * shape.num_kv_heads * keys * shape.head_size * dtype.size
    pairs = [
        [
            mx.zeros((requests, shape.num_kv_heads, keys, width), dtype)
            for width in (shape.head_size, shape.value_size)
        ]
        for _ in range(max(-(-rotated // size), 1))
    ]
    queries = mx.ones((requests, shape.num_heads, query, shape.head_size), dtype)
    mx.eval(pairs, queries)
    turn, scale = itertools.cycle(pairs), shape.head_size**-0.5

    def call(fence: mx.array) -> list[mx.array]:
        # Each call waits for the previous one, as layers do.
        first = queries + fence[0].astype(dtype)
        out = mx.fast.scaled_dot_product_attention(
            first, *next(turn), scale=scale, mask="causal" if query > 1 else None
        )
        done = (out.reshape(-1)[:1] * 0).astype(fence.dtype)
        return [mx.broadcast_to(done, fence.shape), out]

    return call


def decode_shares(
    case: Case, times: dict[str, dict[str, float]], copy: float
) -> dict[str, dict[str, float]]:
    """Relates our decode kernels' speed to copy bandwidth and to MLX; pops "contiguous" from times.

    Args:
        times: result of `timing.compare`.
        copy: bytes per second, see `timing.copy_bandwidth`.

    Returns:
        For each call, "copy": the kernels' bytes/s of K and V relative to `copy`, and "mlx", if MLX
        supports the case: their speed relative to its attention over contiguous K and V.
    """
    found = {}
    theirs = times.pop(BACKEND, {})
    row = case.row_bytes * (1 if case.shape.latent else 2)
    for name, seconds in times[BACKENDS[0]].items():
        requests, _, _, _, context = name.split()
        positions = min(int(context), case.window or int(context))
        found[name] = {"copy": int(requests) * positions * row / seconds / copy}
        if name in theirs:
            found[name]["mlx"] = theirs[name] / seconds
    return found
