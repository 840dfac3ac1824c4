# SPDX-License-Identifier: Apache-2.0
"""Blocks repacked for MLX decode to what the gguf package decodes from the original blocks."""

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from vllm_metal.gguf.quant import EXACT, GROUP_SIZE, repack

ROWS, COLUMNS = 5, 96


def blocks_of(kind: Kind, seed: int) -> np.ndarray:
    """Random bytes as blocks, with finite scales: every code occurs, also ones no encoder makes."""
    rng = np.random.default_rng(seed)
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    data = rng.integers(0, 256, (ROWS, COLUMNS // 32, block_bytes), dtype=np.uint8)
    for at in (0, 2) if EXACT[kind].has_min else (0,):
        floats = rng.standard_normal((ROWS, COLUMNS // 32, 1)).astype(np.float16)
        data[..., at : at + 2] = floats.view(np.uint8)
    return data.reshape(ROWS, -1)


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_repacked_blocks_decode_to_the_same_values(kind: Kind) -> None:
    data = blocks_of(kind, seed=0)
    words, *rows = repack(data, kind)
    scales, biases = (mx.array(a).astype(mx.float32) for a in rows)
    decoded = mx.dequantize(
        mx.array(words), scales, biases, group_size=GROUP_SIZE, bits=EXACT[kind].bits
    )
    expected = gguf.dequantize(data, kind)
    # q * scale + bias is one rounding away from (q - zero) * scale; 256 is the largest |q|.
    tolerance = np.abs(np.asarray(scales)).max() * 256 * np.finfo(np.float32).eps
    np.testing.assert_allclose(np.array(decoded), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_repacked_rows_multiply_like_the_dense_matrix(kind: Kind) -> None:
    data = blocks_of(kind, seed=7)
    words, *rows = repack(data, kind)
    x = mx.random.normal((3, COLUMNS), key=mx.random.key(0))
    scales, biases = (mx.array(a).astype(mx.float32) for a in rows)
    product = mx.quantized_matmul(
        x, mx.array(words), scales, biases, group_size=GROUP_SIZE, bits=EXACT[kind].bits
    )
    expected = np.array(x) @ gguf.dequantize(data, kind).T
    np.testing.assert_allclose(np.array(product), expected, rtol=1e-4, atol=2e-3)


def test_biases_are_exact_in_float16() -> None:
    for kind, layout in EXACT.items():
        _, scales, biases = repack(blocks_of(kind, seed=1), kind)
        if not layout.has_min:
            expected = scales.astype(np.float64) * -(2.0 ** (layout.bits - 1))
            np.testing.assert_array_equal(biases.astype(np.float64), expected)
