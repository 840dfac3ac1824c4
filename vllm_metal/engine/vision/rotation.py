# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding with three positions per token, on top of a text model's RoPE.

mlx-lm's text models rotate by one position per token, which is right if all three are equal, as in
text. Only steps with image tokens rotate queries and keys by the values computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from vllm_metal.engine.attention.forward_inputs import ForwardInputs, optional_of_rows
from vllm_metal.identity.model_files import ModelLoadError

#: Key of a step's cosines and sines in its extras.
ROTATION = "rotation"


@dataclass(frozen=True)
class Rotation:
    """Rotary frequencies, and the axis (time, height or width) that each rotates by."""

    frequencies: mx.array  # [D / 2] float32, of each pair
    axes: mx.array  # [D / 2] int32, index of the position that rotates the pair

    def of_rows(self, positions: mx.array) -> mx.array:
        """[T, 2, D / 2] float32 cosines and sines for [A, T] int32 positions on A axes."""
        angles = positions.astype(mx.float32).T[:, self.axes] * self.frequencies
        return mx.stack([mx.cos(angles), mx.sin(angles)], axis=1)


def positioned(
    inputs: ForwardInputs, shifts_np: np.ndarray | None, rotation: Rotation | None
) -> ForwardInputs:
    """Adds the tokens' shifts to a forward's positions.

    Args:
        inputs: its positions are each token's index in the request.
        shifts_np: see ShiftTable.of_rows.
        rotation: the network's; None: the network rotates by one position per token, the time.
    """
    if shifts_np is None:
        return inputs
    if rotation is None or len(shifts_np) == 1:
        return replace(inputs, positions=inputs.positions + mx.array(shifts_np[:1]))
    turned = rotation.of_rows(inputs.positions + mx.array(shifts_np))
    return inputs.with_extras({ROTATION: turned})


class RopeOfRows(nn.Module):
    """A layer's RoPE; rotates by the step's ROTATION in steps with image tokens."""

    def __init__(self, rope: nn.RoPE) -> None:
        super().__init__()
        self._rope: Any = rope

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotates [n, H, L, D] queries or keys."""
        rotation = optional_of_rows(ROTATION)
        if rotation is not None:
            return _rotate(x, rotation)
        plain: mx.array = self._rope(x, offset)
        return plain


def _rotate(x: mx.array, rotation: mx.array) -> mx.array:
    """Rotates [n, H, L, D] by [n, L, 2, d] cosines and sines; pairs elements i and i + d."""
    cos, sin = rotation[:, None, :, 0], rotation[:, None, :, 1]
    pairs = rotation.shape[-1]
    first, second = x[..., :pairs].astype(mx.float32), x[..., pairs : 2 * pairs].astype(mx.float32)
    parts = [first * cos - second * sin, second * cos + first * sin]
    rest = [x[..., 2 * pairs :]] if x.shape[-1] > 2 * pairs else []
    return mx.concatenate([*(part.astype(x.dtype) for part in parts), *rest], axis=-1)


def put_in(model: nn.Module, sections: Sequence[int], interleaved: bool = True) -> Rotation:
    """Makes a text model's RoPE modules use a step's ROTATION.

    Args:
        model: mlx-lm's layers, with one RoPE setting for all of them.
        sections: number of frequencies per axis (time, height, width).
        interleaved: frequencies 3i + 1 are the height's and 3i + 2 the width's, up to each one's
            section; all others are the time's (`apply_interleaved_mrope` of transformers'
            qwen3_vl). Otherwise the sections follow each other, as in Qwen2-VL.

    Raises:
        ModelLoadError: a layer has another kind of RoPE, or the sections have another total.
    """
    ropes = [(layer, layer.rope) for _, layer in model.named_modules() if "rope" in layer]
    kinds = {_kind(rope) for _, rope in ropes}
    if len(kinds) != 1:
        raise ModelLoadError(
            f"images are not supported with layers of {len(kinds)} different RoPE settings. Serve "
            "the text with --language-model-only"
        )
    ((dims, base),) = kinds
    if sum(sections) != dims // 2:
        raise ModelLoadError(
            f"mrope_section={list(sections)} is not supported with rotary embeddings of {dims} "
            f"elements: the sections must add up to {dims // 2}"
        )
    for layer, rope in ropes:
        layer.rope = RopeOfRows(rope)
    pairs = np.arange(dims // 2)
    axes = np.zeros(dims // 2, np.int32)
    for axis in (1, 2):
        axes[(pairs % 3 == axis) & (pairs < 3 * sections[axis])] = axis
    if not interleaved:
        axes = np.repeat(np.arange(3, dtype=np.int32), sections)
    frequencies = (1 / float(base) ** (2 * pairs / dims)).astype(np.float32)
    return Rotation(mx.array(frequencies), mx.array(axes))


def _kind(rope: Any) -> tuple[int, float]:
    if type(rope) is not nn.RoPE or rope.traditional or rope.scale != 1.0:
        raise ModelLoadError(
            f"images are not supported with {type(rope).__name__}: they need RoPE with three "
            "positions per token. Serve the text with --language-model-only"
        )
    return rope.dims, rope.base
