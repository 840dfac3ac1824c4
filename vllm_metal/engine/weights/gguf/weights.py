# SPDX-License-Identifier: Apache-2.0
"""Decides how to store each GGUF tensor: dense, in the same blocks, or requantized."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, dequantize

from .blocks import EXACT, FLOATS, GROUP_SIZE, WITH_MINIMUM, blocks_of, middle, quantized_values
from .family import Family
from .names import ROPE_FREQS, row_order, tensor_names
from .safetensors import StoredTensor
from .source import ConversionError, GGUFSource, GGUFTensor

DType = Literal["float16", "bfloat16", "float32"]
_TYPE_NAMES: Mapping[DType, str] = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_MLX: Mapping[DType, mx.Dtype] = {
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "float32": mx.float32,
}
#: Block types that are kept as they are.
_KEPT = tuple(GGMLQuantizationType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"))
_KQUANTS = tuple(GGMLQuantizationType[f"Q{bits}_K"] for bits in (2, 3, 4, 5, 6))
#: Supported types, in the order in which errors list them.
_SUPPORTED = (*FLOATS, *_KEPT, *_KQUANTS)
_NAMES: Mapping[str, DType] = {name: dtype for dtype, name in _TYPE_NAMES.items()}
# Values decoded at a time: 1 MiB of float32 stays in cache. Sizes from 2^16 to 2^24 were equally
# fast.
_CHUNK_VALUES = 1 << 18

Rows = dict[str, npt.NDArray[Any]]
"""Maps parameter suffixes ("weight", "scales", "biases", "bias") to rows as stored."""


@dataclass(frozen=True)
class Weight:
    """One GGUF tensor and how it is stored."""

    source: GGUFTensor
    module: str
    """Path of the module in mlx-lm's model, such as "model.layers.0.mlp.up_proj"."""
    bits: int | None
    """Bits per stored value, in groups of GROUP_SIZE; None for a dense tensor."""
    stored: tuple[StoredTensor, ...]
    encode: Callable[[npt.NDArray[Any]], Rows]
    order: npt.NDArray[np.intp] | None
    """The GGUF tensor's row for each row written; None for the same order."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays that are stored for the tensor."""
        return sum(tensor.num_bytes for tensor in self.stored)

    def rows(self) -> Iterator[tuple[int, Rows, int]]:
        """Yields (first row, stored rows by parameter name, GGUF bytes read) piece by piece.

        Raises ConversionError for values that the chosen element type cannot hold.
        """
        data = self.source.data
        step = max(1, _CHUNK_VALUES * len(data) // prod(self.source.shape))
        for start in range(0, len(data), step):
            # A slice of the memory map is a view; picking rows in another order copies them.
            part = data[start : start + step]
            if self.order is not None:
                part = data[self.order[start : start + step]]
            encoded = {
                f"{self.module}.{suffix}": rows for suffix, rows in self.encode(part).items()
            }
            for name, rows in encoded.items():
                if rows.dtype == np.float16 and not np.isfinite(rows).all():
                    raise ConversionError(
                        f"{name}: values beyond float16's range; use --dtype bfloat16 or float32"
                    )
            yield start, encoded, part.nbytes


def plan_weights(
    source: GGUFSource,
    family: Family,
    dtype: DType,
    keep_blocks: bool,
    kquant_bits: int | None,
) -> list[Weight]:
    """Plans how to store every tensor of `source`, in file order, without reading data.

    Args:
        dtype: element type of dense tensors and of scales.
        keep_blocks: whether blocks of 32 values stay quantized.
        kquant_bits: bits for requantized K-quant matrices; None to store them dense.

    Raises:
        ConversionError: a tensor's type is not supported.
    """
    plan = []
    for name, target in tensor_names(family, source).items():
        tensor = source.tensors[name]
        module = target.rsplit(".", 1)[0]
        order = row_order(family, source, name)
        offset = family.norm_offset if name.endswith("norm.weight") else 0.0
        bits = _stored_bits(source, tensor, keep_blocks, kquant_bits)
        stored, encode = _storage(target, tensor, bits, dtype, offset)
        plan.append(Weight(tensor, module, bits, stored, encode, order))
    return plan


def natural_dtype(source: GGUFSource, family: Family) -> DType:
    """Returns the dtype of most matrices; if any is quantized, the family's default."""
    sizes: dict[str, int] = {}
    for tensor in source.tensors.values():
        if tensor.kind in FLOATS and len(tensor.shape) > 1 and tensor.name != ROPE_FREQS:
            name = _NAMES[FLOATS[tensor.kind]]
            sizes[name] = sizes.get(name, 0) + prod(tensor.shape)
    quantized = any(t.kind not in FLOATS for t in source.tensors.values())
    chosen = family.default_dtype if quantized or not sizes else max(sizes, key=lambda k: sizes[k])
    return next(dtype for dtype in _TYPE_NAMES if dtype == chosen)


def quantization_config(plan: list[Weight]) -> dict[str, Any] | None:
    """Builds mlx-lm's "quantization": the most frequent width, and modules with another one."""
    widths = {w.module: w.bits for w in plan if w.bits is not None}
    if not widths:
        return None
    common = max(set(widths.values()), key=list(widths.values()).count)
    config: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": common, "mode": "affine"}
    for module, bits in widths.items():
        if bits != common:
            config[module] = {"group_size": GROUP_SIZE, "bits": bits, "mode": "affine"}
    return config


def _stored_bits(
    source: GGUFSource, tensor: GGUFTensor, keep_blocks: bool, kquant_bits: int | None
) -> int | None:
    kind = tensor.kind
    if kind not in _SUPPORTED:
        raise ConversionError(
            f"{source.path}: tensor {tensor.name} has type {kind.name}, which cannot be converted; "
            f"supported: {', '.join(t.name for t in _SUPPORTED)}"
        )
    if len(tensor.shape) == 2:
        if kind in _KEPT and keep_blocks:
            return EXACT[kind]
        if kind in _KQUANTS:
            return kquant_bits
    return None


def _storage(
    target: str,
    tensor: GGUFTensor,
    bits: int | None,
    dtype: DType,
    offset: float,
) -> tuple[tuple[StoredTensor, ...], Callable[[npt.NDArray[Any]], Rows]]:
    kind = tensor.kind
    module, suffix = target.rsplit(".", 1)
    if bits is None:
        return (
            (StoredTensor(target, _TYPE_NAMES[dtype], tensor.shape),),
            lambda data: {suffix: _cast(_decode(data, kind) - np.float32(offset), dtype)},
        )
    rows, columns = tensor.shape
    groups = (rows, columns // GROUP_SIZE)
    stored = (
        StoredTensor(target, "U32", (rows, columns * bits // 32)),
        StoredTensor(f"{module}.scales", _TYPE_NAMES[dtype], groups),
        StoredTensor(f"{module}.biases", _TYPE_NAMES[dtype], groups),
    )
    if kind in _KEPT:
        return stored, lambda data: _keep(data, kind, dtype)
    return stored, lambda data: _quantize(_decode(data, kind), bits, dtype)


def _keep(data: npt.NDArray[Any], kind: GGMLQuantizationType, dtype: DType) -> Rows:
    blocks = blocks_of(data, kind)
    words = quantized_values(blocks, kind).reshape(len(data), -1).view(np.uint32)
    scales = np.ascontiguousarray(blocks[..., 0:2]).view(np.float16)[..., 0]
    if kind in WITH_MINIMUM:
        biases = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
    else:
        biases = scales * np.float16(middle(kind))
    return {"weight": words, "scales": _cast(scales, dtype), "biases": _cast(biases, dtype)}


def _quantize(values: npt.NDArray[np.float32], bits: int, dtype: DType) -> Rows:
    dense = mx.array(values).astype(_MLX[dtype])
    parts = mx.quantize(dense, group_size=GROUP_SIZE, bits=bits)
    words, scales, biases = (_to_numpy(part) for part in parts)
    return {"weight": words, "scales": scales, "biases": biases}


def _decode(data: npt.NDArray[Any], kind: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = dequantize(data, kind).astype(np.float32, copy=False)
    return values


def _cast(values: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Casts to `dtype`; bfloat16, which numpy lacks, as its uint16 bit pattern."""
    if dtype == "bfloat16":
        return _to_numpy(mx.array(values).astype(mx.bfloat16))
    with np.errstate(over="ignore"):  # Weight.rows reports what does not fit
        return values.astype(dtype, copy=False)


def _to_numpy(array: mx.array) -> npt.NDArray[Any]:
    return np.asarray(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)
