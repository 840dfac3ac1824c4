# SPDX-License-Identifier: Apache-2.0
"""Computes repeated parts of MLX's layers once while a forward is traced.

A compiled graph repeats every traced operation in every step. Two kinds of them have the same
result each time: views of weights, and the angles of rotary embeddings, which all layers compute
from the same positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from vllm_metal.patches.mlx_patches.replacing import replaced

RELEASES = ("mlx 0.32",)

# Quantized layers have no such views, and on a GPU angles are part of one operation, so this mostly
# serves MLX's CPU backend. Without both, host time of a decode step there is 17 % longer for 1
# request and 10 % for 32; without shared angles 13 % and 10 %, without views 4 % and 3 %
# (benchmarks/step_overhead.py's model of 28 layers; medians of 40 alternating rounds of 10 steps
# each, in one process).


class TransposedWeights:
    """Transposed views of linear layers' weights, made once per network, not per call."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._by_layer: dict[int, mx.array] = {}  # by id

    def make(self) -> None:
        """Creates and evaluates the views, so that traces treat them as constants."""
        if not self._by_layer:
            for _, module in self._model.named_modules():
                if isinstance(module, nn.Linear):
                    self._by_layer[id(module)] = module["weight"].T
            mx.async_eval(list(self._by_layer.values()))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Makes the network's linear layers multiply by the views within the block."""
        call = nn.Linear.__call__

        def multiply(layer: nn.Linear, x: mx.array) -> mx.array:
            weight = self._by_layer.get(id(layer))
            if weight is None:
                return call(layer, x)
            return mx.addmm(layer["bias"], x, weight) if "bias" in layer else x @ weight

        with replaced(nn.Linear, "__call__", multiply):
            yield


@contextmanager
def angles_shared() -> Iterator[None]:
    """Shares sines and cosines between rotary embeddings of the same positions in the block."""
    # On a GPU a rotary embedding is one operation. The CPU backend uses many, and MLX's compiler
    # cannot merge those of different layers, because they begin with an operation without input.
    if mx.default_device().type == mx.DeviceType.gpu:
        yield
        return
    rope = mx.fast.rope
    found: dict[tuple[Any, ...], tuple[mx.array, mx.array]] = {}
    kept: list[object] = []  # keeps objects alive whose ids are keys

    def rotate(
        x: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None,
        scale: float,
        offset: int | mx.array,
        freqs: mx.array | None = None,
        stream: Any = None,
    ) -> mx.array:
        if not isinstance(offset, mx.array) or x.ndim != 4 or x.shape[2] != 1 or stream is not None:
            return rope(
                x,
                dims,
                traditional=traditional,
                base=base,
                scale=scale,
                offset=offset,
                freqs=freqs,
                stream=stream,
            )
        key = dims, base, scale, id(offset), id(freqs), x.dtype
        if key not in found:
            angles = _angles(dims, base, scale, offset, freqs)
            found[key] = mx.cos(angles).astype(x.dtype), mx.sin(angles).astype(x.dtype)
            kept.extend((offset, freqs))
        return _rotate(x, dims, traditional, *found[key])

    with replaced(mx.fast, "rope", rotate):
        yield


def _angles(
    dims: int, base: float | None, scale: float, offset: mx.array, freqs: mx.array | None
) -> mx.array:
    """Returns [T, 1, 1, dims / 2] float32 of [T] positions, as `mx.fast.rope` documents."""
    positions = offset.astype(mx.float32).reshape(-1, 1, 1, 1) * scale
    if freqs is not None:
        return positions * mx.reciprocal(freqs.astype(mx.float32))
    assert base is not None  # MLX requires one of the two
    exponents = mx.arange(0, -(dims // 2), -1, mx.float32)
    return positions * mx.exp(exponents * (math.log(base) / (dims // 2)))


def _rotate(
    x: mx.array, dims: int, traditional: bool, cosines: mx.array, sines: mx.array
) -> mx.array:
    """Rotates the first `dims` of each head of [T, H, 1, D] (Su et al. 2021, arXiv:2104.09864).

    Pairs are neighbors if `traditional`, else half the dims apart.
    """
    half = dims // 2
    if traditional:
        first, second = x[..., 0:dims:2], x[..., 1:dims:2]
    else:
        first, second = x[..., :half], x[..., half:dims]
    parts = [first * cosines - second * sines, first * sines + second * cosines]
    if traditional:
        parts = [mx.stack(parts, axis=-1).reshape(*x.shape[:-1], dims)]
    if dims < x.shape[-1]:
        parts.append(x[..., dims:])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)
