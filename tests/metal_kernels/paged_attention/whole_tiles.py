# SPDX-License-Identifier: Apache-2.0
"""Imitates MLX's fused attention on an M5, which reads whole tiles of K and V."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from metal_kernels import kv_gather

TILE = 64  # keys


class WholeTiles:
    """Replaces `mx.fast.scaled_dot_product_attention` and `kv_gather.gather`.

    Extends keys to whole tiles with the memory behind them, within the gathered
    arrays. Everything is multiplied, invisible keys with weights of 0.
    """

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self._gather = kv_gather.gather
        self._gathered: list[np.ndarray] = []  # flat

    def gather(self, *args: Any, **options: Any) -> tuple[mx.array, mx.array]:
        context, fence = self._gather(*args, **options)
        mx.eval(context)
        self._gathered.append(np.asarray(memoryview(context)).reshape(-1))
        return context, fence

    def attend(self, q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
        """Attends for one request in float32."""
        self.calls.append({"q": q.shape, "k": k.shape, **options})
        mx.eval(q, k, v)
        num_keys, num_rows = k.shape[2], q.shape[2]
        keys, values = self._widened(k), self._widened(v)
        group = q.shape[1] // k.shape[1]
        keys, values = (np.repeat(part.astype(np.float64), group, 0) for part in (keys, values))
        with np.errstate(invalid="ignore"):
            scores = np.array(q[0]).astype(np.float64) @ keys.swapaxes(1, 2) * options["scale"]
        seen = np.zeros((num_rows, keys.shape[1]), bool)
        mask = options["mask"]
        if isinstance(mask, str):
            assert mask == "causal"
            mask = np.arange(num_keys) <= np.arange(num_rows)[:, None] + num_keys - num_rows
        seen[:, :num_keys] = np.array(mask)
        scores = np.where(seen, scores, -np.inf)
        sinks = options["sinks"]
        rest = np.full(q.shape[1], -np.inf) if sinks is None else np.array(sinks, np.float64)
        top = np.maximum(scores.max(axis=2), rest[:, None])[..., None]
        weights = np.exp(scores - top)
        total = weights.sum(axis=2, keepdims=True) + np.exp(rest[:, None, None] - top)
        return mx.array((weights @ values / total).astype(np.float32))[None]

    def _widened(self, part: mx.array) -> np.ndarray:
        """Returns [h, whole tiles, D] of [1, h, S, D]; the last head's end with the array."""
        view = np.asarray(memoryview(part))[0]
        (base,) = (flat for flat in self._gathered if np.may_share_memory(flat, view))
        at = view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        first, size = at // base.itemsize, view.shape[2]
        length = -(-view.shape[1] // TILE) * TILE
        head = view.strides[0] // base.itemsize if len(view) > 1 else 0
        heads = []
        for index in range(len(view)):
            rows = base[first + index * head :][: length * size].reshape(-1, size)
            heads.append(np.pad(rows, [(0, length - len(rows)), (0, 0)]))
        return np.stack(heads)
