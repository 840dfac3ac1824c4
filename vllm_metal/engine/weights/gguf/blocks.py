# SPDX-License-Identifier: Apache-2.0
"""Extracts values, scales and minima from GGUF's blocks, in the order of MLX's packings.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. Blocks of 32 values
become groups of 32. A Q4_K or Q5_K block of 256 has eight groups of 32: a group's scale is
`d * scale`, its bias `-dmin * min`. GGUF's MXFP4 orders values differently from the hub's.
"""

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

Bytes = npt.NDArray[np.uint8]
_Kind = GGMLQuantizationType
#: Unquantized types, with safetensors' names.
FLOATS = {_Kind.F32: "F32", _Kind.F16: "F16", _Kind.BF16: "BF16"}
#: Types with an exact MLX packing, with bits per value.
EXACT = {
    _Kind.Q4_0: 4,
    _Kind.Q4_1: 4,
    _Kind.Q5_0: 5,
    _Kind.Q5_1: 5,
    _Kind.Q8_0: 8,
    _Kind.MXFP4: 4,
    _Kind.Q4_K: 4,
    _Kind.Q5_K: 5,
}
WITH_MINIMUM = (_Kind.Q4_1, _Kind.Q5_1)
#: Types with two levels of scales that stay packed.
TWO_LEVELS = (_Kind.Q4_K, _Kind.Q5_K)
GROUP_SIZE = 32


def blocks_of(rows: Bytes, kind: GGMLQuantizationType) -> Bytes:
    """Reshapes [rows, bytes per row] to [rows, blocks, bytes per block]."""
    return np.ascontiguousarray(rows).reshape(len(rows), -1, GGML_QUANT_SIZES[kind][1])


def quantized_values(blocks: Bytes, kind: GGMLQuantizationType) -> Bytes:
    """Extracts the quantized values of [rows, blocks, bytes], packed as MLX packs them."""
    if kind == _Kind.Q8_0:
        return blocks[..., 2:] ^ np.uint8(0x80)  # flipping the sign bit adds 128
    if kind == _Kind.MXFP4:
        return _nibbles(blocks[..., 1:], 16)
    if kind == _Kind.Q4_0:
        return _nibbles(blocks[..., 2:], 16)
    if kind == _Kind.Q4_1:
        return _nibbles(blocks[..., 4:], 16)
    if kind == _Kind.Q4_K:
        return _nibbles(blocks[..., 16:], 32)
    if kind == _Kind.Q5_K:
        low = _halves(blocks[..., 48:], 32)
        shifts = np.arange(8, dtype=np.uint8)[:, None]
        high: Bytes = (blocks[..., None, 16:48] >> shifts) & np.uint8(1)
        return _five_bits(low | (high.reshape(low.shape) << np.uint8(4)))
    start = 4 if kind in WITH_MINIMUM else 2
    low = _halves(blocks[..., start + 4 :], 16)
    fifth = np.unpackbits(blocks[..., start : start + 4], axis=-1, bitorder="little")
    return _five_bits(low | (fifth << np.uint8(4)))


def _halves(packed: Bytes, run: int) -> Bytes:
    """Splits bytes into 4-bit values: for each `run` bytes, all low halves, then all high ones."""
    by_run = packed.reshape(*packed.shape[:-1], -1, 1, run)
    both = np.concatenate([by_run & 0x0F, by_run >> 4], axis=-2)
    return both.reshape(*packed.shape[:-1], -1)


def _nibbles(packed: Bytes, run: int) -> Bytes:
    """Splits bytes as `_halves` does, and packs two neighboring values into each byte."""
    values = _halves(packed, run)
    packed_again: Bytes = values[..., 0::2] | (values[..., 1::2] << np.uint8(4))
    return packed_again


def _five_bits(values: Bytes) -> Bytes:
    """Packs [..., n] values below 32 into [..., n * 5 / 8] bytes."""
    eight = values.reshape(*values.shape[:-1], -1, 8)
    words = np.zeros(eight.shape[:-1], np.uint64)
    for index in range(8):
        words |= eight[..., index].astype(np.uint64) << np.uint64(5 * index)
    stream: Bytes = words[..., None].view(np.uint8)[..., :5]
    return stream.reshape(*values.shape[:-1], -1)


def middle(kind: GGMLQuantizationType) -> float:
    """Returns the bias of a group, in units of its scale, for types without minima."""
    return -float(1 << (EXACT[kind] - 1))


def scales_of_two_levels(blocks: Bytes, which: int) -> Bytes:
    """Returns float32 scales (`which` = 0) or minima (1) of a block's eight groups, as bytes."""
    packed = blocks[..., 4:16]  # 6-bit numbers; the last four of each kind are split in two
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    first = (low, middle)[which]
    last = (high & 0x0F, high >> 4)[which]
    six = np.concatenate([first & 0x3F, last | ((first >> 6) << 4)], axis=-1)
    start = 2 * which
    factor = np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)
    scales: Bytes = (factor.astype(np.float32) * six.astype(np.float32)).view(np.uint8)
    return scales
