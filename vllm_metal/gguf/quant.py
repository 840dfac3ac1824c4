# SPDX-License-Identifier: Apache-2.0
"""Repacks GGUF's blocks of 32 values as MLX's affine groups, without changing a value.

MLX holds w = scale * q + bias with unsigned q of 4, 5 or 8 bits packed little-endian into uint32,
one scale and bias a group. A GGUF block is one scale (and for the _1 types one minimum) over 32
values, so with groups of 32 each block becomes one group:

    Q4_0, Q5_0   w = d * (q - 2^(bits-1))   scale d, bias -2^(bits-1) * d
    Q4_1, Q5_1   w = d * q + m              scale d, bias m
    Q8_0         w = d * q, q signed        scale d, bias -128 * d, q + 128

The biases are powers of two times a float16, hence exact in float16. Block layouts:
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0 ... block_q8_0).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

GROUP_SIZE = 32
"""Values of one GGUF block, and of one MLX group here."""


@dataclass(frozen=True)
class BlockLayout:
    """Byte layout of one block: float16 d, [float16 m], [4 bytes of fifth bits], the rest of q."""

    bits: int
    has_min: bool


EXACT: dict[GGMLQuantizationType, BlockLayout] = {
    GGMLQuantizationType.Q4_0: BlockLayout(4, False),
    GGMLQuantizationType.Q4_1: BlockLayout(4, True),
    GGMLQuantizationType.Q5_0: BlockLayout(5, False),
    GGMLQuantizationType.Q5_1: BlockLayout(5, True),
    GGMLQuantizationType.Q8_0: BlockLayout(8, False),
}
"""Types that stay quantised, bit for bit."""

KQUANTS = frozenset(
    {
        GGMLQuantizationType.Q2_K,
        GGMLQuantizationType.Q3_K,
        GGMLQuantizationType.Q4_K,
        GGMLQuantizationType.Q5_K,
        GGMLQuantizationType.Q6_K,
    }
)
"""Types with two levels of scales, which MLX has no format for."""

FLOATS = {
    GGMLQuantizationType.F32: "float32",
    GGMLQuantizationType.F16: "float16",
    GGMLQuantizationType.BF16: "bfloat16",
}
"""Types that are not quantised, with MLX's name of each."""

SUPPORTED = (*FLOATS, *EXACT, *sorted(KQUANTS))
"""Every tensor type that can be converted, in the order in which errors list them."""


def repack(
    data: npt.NDArray[np.uint8], kind: GGMLQuantizationType
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Rows of blocks, uint8 of shape (rows, bytes of a row), as MLX affine groups.

    Returns:
        Packed q, (rows, columns * bits / 32); scales and biases, (rows, columns / GROUP_SIZE).
    """
    layout = EXACT[kind]
    block_bytes = GGML_QUANT_SIZES[kind][1]
    blocks = np.ascontiguousarray(data).reshape(data.shape[0], -1, block_bytes)
    scales = np.ascontiguousarray(blocks[..., 0:2]).view(np.float16)[..., 0]
    start = 4 if layout.has_min else 2
    if layout.has_min:
        biases = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
    else:
        biases = scales * np.float16(-(2 ** (layout.bits - 1)))
    packed = _pack(blocks[..., start:], layout.bits)
    return packed.reshape(data.shape[0], -1).view(np.uint32), scales, biases


def _pack(body: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """q of blocks, (rows, blocks, bytes), as a little-endian bit stream in MLX's order."""
    if bits == 8:
        return np.ascontiguousarray(body) ^ np.uint8(0x80)  # signed q + 128
    nibbles = body if bits == 4 else body[..., 4:]
    # Low nibbles are values 0..15 of the block, high nibbles 16..31.
    q = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=-1)
    if bits == 4:
        return np.ascontiguousarray(q[..., 0::2] | (q[..., 1::2] << 4))
    fifth = np.unpackbits(np.ascontiguousarray(body[..., :4]), axis=-1, bitorder="little")
    low = np.unpackbits(q[..., None], axis=-1, bitorder="little", count=4)
    stream = np.concatenate([low, fifth[..., None]], axis=-1)
    return np.packbits(stream.reshape(*q.shape[:-1], -1), axis=-1, bitorder="little")
