# SPDX-License-Identifier: Apache-2.0
"""Repacks GGUF's blocks for MLX without changing a value, or decodes them in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from vllm_metal.engine.weights.gguf.blocks import (
    EXACT,
    FLOATS,
    GROUP_SIZE,
    TWO_LEVELS,
    WITH_MINIMUM,
    Bytes,
    blocks_of,
    middle,
    quantized_values,
    scales_of_two_levels,
)
from vllm_metal.engine.weights.gguf.source import GGUFTensor
from vllm_metal.engine.weights.lazy import LazyArray, evaluate
from vllm_metal.engine.weights.packed import Packed, Weight, requantized, stacked
from vllm_metal.engine.weights.plan import Arrays

Order = npt.NDArray[np.intp] | None
Convert = Callable[[Arrays, mx.Dtype], Weight]
#: Values decoded and rounded at a time; rounding takes some 20 bytes per value.
_ROUNDED_AT_ONCE = 1 << 20
#: Values decoded at a time, so that temporary arrays stay in the CPU's cache.
_AT_ONCE = 1 << 18


def is_readable(kind: GGMLQuantizationType) -> bool:
    if kind in FLOATS or kind in EXACT:
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:  # by gguf
        return False
    return True


def plain(tensor: GGUFTensor, order: Order = None) -> LazyArray:
    """Opens a floating-point tensor, with its rows in `order`."""

    def fill(target: Bytes) -> None:
        rows = tensor.data  # for a vector, each element is a row
        target.reshape(rows.shape)[:] = rows if order is None else rows[order]

    return LazyArray(FLOATS[tensor.kind], tensor.shape, fill)


def exact(tensor: GGUFTensor, order: Order = None) -> tuple[dict[str, LazyArray], Convert]:
    """Opens a tensor of a type in EXACT; returns its arrays, and a function that packs them.

    Args:
        tensor: [..., out, in].
        order: the file's row for each row of the weight; None for the same order.
    """
    kind, bits = tensor.kind, EXACT[tensor.kind]
    *outer, num_in = tensor.shape
    words = (*outer, num_in * bits // 32)
    groups = (*outer, num_in // GROUP_SIZE)

    def lazy(dtype: str, shape: tuple[int, ...], of: Callable[[Bytes], Bytes]) -> LazyArray:
        return LazyArray(dtype, shape, lambda target: _fill(target, tensor, order, of))

    values = lazy("U32", words, lambda blocks: quantized_values(blocks, kind))
    if kind == GGMLQuantizationType.MXFP4:
        exponents = lazy("U8", groups, lambda blocks: blocks[..., :1])
        return {"quantized": values, "scales": exponents}, _mxfp4
    if kind in TWO_LEVELS:
        scales = lazy("F32", groups, lambda blocks: scales_of_two_levels(blocks, 0))
        minima = lazy("F32", groups, lambda blocks: scales_of_two_levels(blocks, 1))
        parts = {"quantized": values, "scales": scales, "minima": minima}
        return parts, lambda a, dtype: _affine(a, -a["minima"].astype(dtype), bits, dtype)
    parts = {"quantized": values, "scales": lazy("F16", groups, lambda blocks: blocks[..., 0:2])}
    if kind in WITH_MINIMUM:
        parts["minima"] = lazy("F16", groups, lambda blocks: blocks[..., 2:4])
        return parts, lambda a, dtype: _affine(a, a["minima"].astype(dtype), bits, dtype)
    bias = middle(kind)
    return parts, lambda a, dtype: _affine(a, a["scales"].astype(dtype) * bias, bits, dtype)


def decoded(
    tensor: GGUFTensor, packs: bool, order: Order = None
) -> tuple[dict[str, LazyArray], Convert]:
    """Opens a tensor of any type; returns its arrays, and a function that dequantizes them.

    Args:
        tensor: [..., out, in].
        packs: whether to pack the weight in 8 bits instead of leaving it dense.
        order: the file's row for each row of the weight; None for the same order.
    """
    *outer, num_in = tensor.shape
    num_rows = tensor.rows.shape[0]
    parts: dict[str, LazyArray] = {}
    rows_at_once = max(_ROUNDED_AT_ONCE // num_in, 1)
    for index, start in enumerate(range(0, num_rows, rows_at_once)):
        part = slice(start, min(start + rows_at_once, num_rows))

        def fill(target: Bytes, part: slice = part) -> None:
            _fill(target, tensor, order, lambda blocks: _dense(blocks, tensor.kind), part)

        parts[str(index)] = LazyArray("F32", (part.stop - part.start, num_in), fill)

    def convert(arrays: Arrays, dtype: mx.Dtype) -> Weight:
        made = []
        for index in range(len(parts)):
            rows = arrays[str(index)]
            made.append(requantized(rows, dtype) if packs else rows.astype(dtype))
            evaluate(arrays_in(made[-1]))  # so that float32 rows do not accumulate
        return _shaped(stacked(made), outer)

    return parts, convert


def arrays_in(weight: Weight) -> list[mx.array]:
    if not isinstance(weight, Packed):
        return [weight]
    found = (
        weight.quantized,
        weight.scales,
        weight.biases,
        weight.output_scale,
        weight.input_order,
    )
    return [each for each in found if each is not None]


def _shaped(weight: Weight, outer: list[int]) -> Weight:
    # Rows of [..., out] were flattened into one axis.
    if not isinstance(weight, Packed):
        return weight.reshape(*outer, weight.shape[-1])
    quantized, scales, biases = (
        None if part is None else part.reshape(*outer, part.shape[-1])
        for part in (weight.quantized, weight.scales, weight.biases)
    )
    assert quantized is not None and scales is not None
    return Packed(quantized, scales, biases, weight.mode, weight.bits, weight.group_size)


def _affine(arrays: Arrays, biases: mx.array, bits: int, dtype: mx.Dtype) -> Packed:
    scales = arrays["scales"].astype(dtype)
    return Packed(arrays["quantized"], scales, biases, "affine", bits, GROUP_SIZE)


def _mxfp4(arrays: Arrays, dtype: mx.Dtype) -> Packed:
    return Packed(arrays["quantized"], arrays["scales"], None, "mxfp4", 4, GROUP_SIZE)


def _fill(
    target: Bytes,
    tensor: GGUFTensor,
    order: Order,
    of: Callable[[Bytes], Bytes],
    part: slice = slice(None),
) -> None:
    """Converts the blocks of rows into `target`, some rows at a time."""
    rows = tensor.rows
    wanted = range(*part.indices(rows.shape[0]))
    out = target.reshape(len(wanted), -1)
    for step in _steps(wanted, tensor.shape[-1]):
        chosen = rows[step] if order is None else rows[order[step]]
        made = (
            np.ascontiguousarray(of(blocks_of(chosen, tensor.kind)))
            .view(np.uint8)
            .reshape(len(chosen), -1)
        )
        out[step.start - wanted.start : step.stop - wanted.start] = made.reshape(len(chosen), -1)


def _steps(wanted: range, num_in: int) -> Iterator[slice]:
    length = max(_AT_ONCE // num_in, 1)
    for start in range(wanted.start, wanted.stop, length):
        yield slice(start, min(start + length, wanted.stop))


def _dense(blocks: Bytes, kind: GGMLQuantizationType) -> Bytes:
    values = dequantize(blocks.reshape(blocks.shape[0], -1), kind).astype(np.float32, copy=False)
    return np.ascontiguousarray(values).view(np.uint8)
