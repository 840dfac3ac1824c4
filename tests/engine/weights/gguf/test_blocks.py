# SPDX-License-Identifier: Apache-2.0
"""Blocks of each GGUF type, against recorded outputs of ggml's C code."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from vllm_metal.engine.weights import gguf_blocks, lazy
from vllm_metal.engine.weights.gguf.source import GGUFTensor
from vllm_metal.engine.weights.packed import Packed, Weight

KEPT = np.load(Path(__file__).parent / "blocks.npz")
KINDS = [Kind[name.removesuffix(".blocks")] for name in KEPT.files if name.endswith(".blocks")]
BOUND = 1e-6  # of the largest magnitude, in float32


def read(kind: Kind, blocks: np.ndarray) -> np.ndarray:
    """Returns these blocks' values as multiplied in float32."""
    shape = KEPT[f"{kind.name}.values"].shape
    tensor = GGUFTensor("x", kind, shape, blocks)
    is_exact = kind in gguf_blocks.EXACT
    made = gguf_blocks.exact(tensor) if is_exact else gguf_blocks.decoded(tensor, packs=False)
    parts, convert = made
    weight: Weight = convert(lazy.arrays_of(parts), mx.float32)
    assert isinstance(weight, Packed) == is_exact
    return np.array(weight.dense(mx.float32) if isinstance(weight, Packed) else weight)


def error(kind: Kind, blocks: np.ndarray) -> float:
    values = KEPT[f"{kind.name}.values"]
    return float(np.abs(read(kind, blocks) - values).max() / np.abs(values).max())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values_are_those_of_ggml(kind: Kind) -> None:
    assert error(kind, KEPT[f"{kind.name}.blocks"]) <= BOUND


def test_types_that_gguf_cannot_dequantize_are_known() -> None:
    assert all(map(gguf_blocks.is_readable, (*KINDS, *gguf_blocks.FLOATS)))
    assert not any(map(gguf_blocks.is_readable, (Kind.Q1_0, Kind.F64, Kind.I32)))


@pytest.mark.parametrize("kind", gguf_blocks.EXACT, ids=lambda kind: kind.name)
def test_other_halves_or_scales_are_far_from_ggml(kind: Kind) -> None:
    blocks = KEPT[f"{kind.name}.blocks"]
    size = GGML_QUANT_SIZES[kind][1]
    parted = blocks.reshape(len(blocks), -1, size)
    halves = parted.copy()
    codes = size - (32 if kind == Kind.Q8_0 else GGML_QUANT_SIZES[kind][0] // 2)
    halves[..., codes:] = (parted[..., codes:] << 4) | (parted[..., codes:] >> 4)
    scales = parted.copy()
    scales[..., 0] ^= 0x02  # of MXFP4 an exponent
    if kind != Kind.MXFP4:
        factors = np.ascontiguousarray(parted[..., :2]).view(np.float16).astype(np.float32)
        reciprocal = np.divide(1, factors, out=np.zeros_like(factors), where=factors != 0)
        scales[..., :2] = np.clip(reciprocal, -6e4, 6e4).astype(np.float16).view(np.uint8)
    for wrong in (halves, scales):
        assert error(kind, wrong.reshape(blocks.shape)) >= 100 * BOUND
