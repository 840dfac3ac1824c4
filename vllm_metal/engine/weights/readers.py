# SPDX-License-Identifier: Apache-2.0
"""Recognizes weights by the tensor names of each format, and checks their tensors.

A reader is called for each tensor, and returns a weight if the tensor holds the weight's values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import mlx.core as mx

from vllm_metal.engine.weights import fp8, integers, mxfp4, nvfp4
from vllm_metal.engine.weights.gptq_awq import gptq_or_awq
from vllm_metal.engine.weights.packed import Weight
from vllm_metal.engine.weights.plan import Arrays, StoredWeight
from vllm_metal.engine.weights.quantization import Config, Entries, Quantization
from vllm_metal.engine.weights.tensors import (
    AGAIN,
    Tensors,
    check_groups,
    contradiction,
    group_size,
)
from vllm_metal.identity.model_files import ModelLoadError

_FLOAT8, _EXPONENT = "F8_E4M3", ("U8", "F8_E8M0")
_FLOATS = ("F32", "BF16", "F16")


def float8(name: str, tensors: Tensors, quantization: Quantization | None) -> StoredWeight | None:
    """Recognizes E4M3 values with scales per tensor, row, block or MX group; None for others."""
    if len(tensors.shape(name)) < 2 or (scale := _scale_of(name, tensors)) is None:
        return None
    # MLX has no such dtype and writes uint8.
    is_mlx_bytes = tensors.dtype(name) == "U8" and scale.endswith("_scale_inv")
    if tensors.dtype(name) != _FLOAT8 and not is_mlx_bytes:
        return None
    parts = {"values": name, "scales": scale}
    shape, of_scale = tensors.shape(name), tensors.shape(scale)
    if tensors.dtype(scale) in _EXPONENT and of_scale == (*shape[:-1], shape[-1] // 32):
        return StoredWeight(
            name, "MXFP8", parts, lambda a, _: fp8.of_mxfp8(a["values"], a["scales"])
        )
    args = _scheme(name, quantization)
    block = _block(quantization, args)
    by_row = _is_by_row(shape, of_scale)
    if args.get("strategy") in ("tensor", "channel") and not by_row:
        raise contradiction(name, f"has scales of {list(of_scale)}", f"strategy={args['strategy']}")
    if by_row and (block is None or not _fits(shape, of_scale, block)):
        if args.get("strategy") == "block":
            raise contradiction(name, f"has scales of {list(of_scale)}", "strategy=block")
        kind = "FP8, one scale per tensor" if _size(of_scale) == 1 else "FP8, one scale per row"
        return StoredWeight(
            name, kind, parts, lambda a, t: fp8.of_rows(a["values"], a["scales"], t)
        )
    if block is None:
        raise ModelLoadError(
            f"{name} has FP8 scales of {list(of_scale)} for a weight of {list(shape)}, but config"
            ".json sets no weight_block_size: use the config.json of the same checkpoint."
        )
    powers = (quantization is not None and quantization.get("scale_fmt") == "ue8m0") or (
        tensors.dtype(scale) in _EXPONENT
    )
    squeezed = tuple(n for n in of_scale if n != 1) if len(of_scale) > len(shape) else of_scale
    if not _fits(shape, squeezed, block):
        raise contradiction(
            name, f"has scales of {list(of_scale)}", f"blocks of {block[0]}x{block[1]}"
        )

    def convert(a: Arrays, dtype: mx.Dtype) -> Weight:
        return fp8.of_blocks(a["values"], a["scales"].reshape(squeezed), block, powers, dtype)

    kind = f"FP8, blocks of {block[0]}x{block[1]}{', powers of two' if powers else ''}"
    return StoredWeight(name, kind, parts, convert)


def blocks_of_gpt_oss(
    name: str, tensors: Tensors, quantization: Quantization | None
) -> StoredWeight | None:
    """Recognizes gpt-oss's MXFP4 experts: `X_blocks` and `X_scales` of a weight X, [E, in, out]."""
    weight = name.removesuffix("_blocks")
    scales = f"{weight}_scales"
    if weight == name or scales not in tensors or tensors.dtype(name) != "U8":
        return None
    parts = {"values": name, "scales": scales}
    return StoredWeight(
        weight, "MXFP4", parts, lambda a, _: mxfp4.of_weight(a["values"], a["scales"]), True
    )


def float4(name: str, tensors: Tensors, quantization: Quantization | None) -> StoredWeight | None:
    """Recognizes NVFP4 and MXFP4, two values per byte; DeepSeek's files have signed bytes (I8)."""
    if tensors.dtype(name) not in ("U8", "I8") or len(tensors.shape(name)) < 2:
        return None
    module = re.sub(r"(\.|_)weight_packed$", "", name)
    weight = name if module == name else f"{module}.weight"
    stem = _stem(name) if module == name else f"{module}.weight"
    candidates = (f"{stem}_scale", _deepseek_scale(name))
    scales = next((each for each in candidates if each in tensors), None)
    if scales is None or (tensors.dtype(name) == "I8" and tensors.dtype(scales) not in _EXPONENT):
        return None
    args = _scheme(weight, quantization)
    group, kind = (16, "NVFP4") if tensors.dtype(scales) == _FLOAT8 else (32, "MXFP4")
    if kind == "MXFP4" and tensors.dtype(scales) not in _EXPONENT:
        return None
    for key, value in (("num_bits", 4), ("group_size", group)):
        stated = args.get(key)
        if stated is not None and stated != value:
            raise contradiction(weight, f"is stored as {kind}", f"{key}={stated}")
    shape, of_scale = tensors.shape(name), tensors.shape(scales)
    if of_scale != (*shape[:-1], 2 * shape[-1] // group):
        raise ModelLoadError(
            f"{weight} has {kind} scales of {list(of_scale)} for values of {list(shape)}: {AGAIN}."
        )
    parts = {"values": name, "scales": scales}
    if kind == "MXFP4":
        return StoredWeight(
            weight, kind, parts, lambda a, _: mxfp4.of_weight(a["values"], a["scales"])
        )
    factor, divisor = f"{stem}_scale_2", f"{stem}_global_scale"
    if (factor in tensors) == (divisor in tensors):
        raise ModelLoadError(f"{weight} is stored as NVFP4 without a tensor scale: {AGAIN}.")
    if factor in tensors:
        parts["factor"] = factor
    else:
        parts["divisor"] = divisor

    def convert(a: Arrays, dtype: mx.Dtype) -> Weight:
        factor = a["factor"] if "factor" in a else 1.0 / a["divisor"].astype(mx.float32)
        return nvfp4.of_weight(a["values"], a["scales"], factor)

    return StoredWeight(weight, kind, parts, convert)


def packed_integers(
    name: str, tensors: Tensors, quantization: Quantization | None
) -> StoredWeight | None:
    """Recognizes compressed-tensors' packed integers; returns None for other tensors."""
    module = name.removesuffix(".weight_packed")
    if module == name or tensors.dtype(name) not in ("I32", "U32"):
        return None
    weight = f"{module}.weight"
    args = _scheme(weight, quantization)
    bits = args.get("num_bits")
    if quantization is None or quantization.method != "compressed-tensors" or not bits:
        raise ModelLoadError(
            f"{weight} is stored as packed integers, but quantization_config sets no num_bits for "
            "it: use the config.json of the same checkpoint."
        )
    parts = tensors.parts(
        values=name,
        scales=f"{weight}_scale",
        shape=f"{weight}_shape",
        zeros=f"{weight}_zero_point",
        g_idx=f"{weight}_g_idx",
    )
    if not {"scales", "shape"} <= set(parts):
        raise ModelLoadError(f"{weight} lacks its scales or its shape: download it again.")
    _check_symmetric(weight, "zeros" in parts, args)
    words = tensors.shape(name)[-1]
    size, groups = group_size(args), tensors.shape(parts["scales"])[-1]
    per = 32 // bits

    def convert(a: Arrays, dtype: mx.Dtype) -> Weight:
        num_in = (
            int(cast(Any, a["shape"].tolist())[-1]) or words * per
        )  # 0 in placeholders of headers-only checkpoints
        if -(-num_in // per) != words:
            raise ModelLoadError(
                f"has {words} words per row for {num_in} inputs, which are not of {bits} bits"
            )
        given = (a["values"], a["scales"], a.get("zeros"), a.get("g_idx"))
        return integers.compressed(*given, bits, num_in, dtype, size)

    if args.get("strategy") == "channel" and groups != 1:
        raise contradiction(weight, f"has {groups} scales per row", "strategy=channel")
    return StoredWeight(weight, f"packed integers, {bits} bits", parts, convert)


def int8(name: str, tensors: Tensors, quantization: Quantization | None) -> StoredWeight | None:
    """Recognizes 8-bit integers, one per byte; returns None for other tensors."""
    scales = f"{name}_scale"
    if tensors.dtype(name) != "I8" or scales not in tensors or len(tensors.shape(name)) < 2:
        return None
    args = _scheme(name, quantization)
    if args.get("num_bits", 8) != 8:
        raise contradiction(name, "is stored in 8 bits", f"num_bits={args['num_bits']}")
    parts = tensors.parts(values=name, scales=scales, zeros=f"{name}_zero_point")
    _check_symmetric(name, "zeros" in parts, args)
    size = group_size(args)
    num_in, of_scale = tensors.shape(name)[-1], tensors.shape(scales)
    if len(of_scale) > 1:
        check_groups(name, num_in, of_scale[-1], size)
    return StoredWeight(
        name,
        "8-bit integers",
        parts,
        lambda a, t: integers.integers(a["values"], a["scales"], a.get("zeros"), t, size),
    )


READERS: tuple[Callable[[str, Tensors, Quantization | None], StoredWeight | None], ...] = (
    blocks_of_gpt_oss,
    float8,
    float4,
    gptq_or_awq,
    packed_integers,
    int8,
)


def _stem(name: str) -> str:
    # Experts in one array have no ".weight" in their names.
    return name if name.endswith(".weight") else f"{name}_weight"


def _deepseek_scale(name: str) -> str:
    """Name of a weight's scales in checkpoints of DeepSeek V4 and V4.1."""
    return f"{name.removesuffix('.weight')}.scale"


def _scale_of(name: str, tensors: Tensors) -> str | None:
    """Returns the name of a weight's scales, by any format's naming scheme; None if missing."""
    candidates = [f"{name}_scale_inv", f"{name}_scale", _deepseek_scale(name)]
    if not name.endswith(".weight"):
        candidates += [f"{name}_weight_scale_inv", f"{name}_weight_scale"]
    return next((each for each in candidates if each in tensors), None)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


def _is_by_row(shape: tuple[int, ...], of_scale: tuple[int, ...]) -> bool:
    """Whether scales are per tensor, expert or row, not per block."""
    *outer, num_out, _ = shape
    count = _size(tuple(outer))
    return _size(of_scale) == 1 or (
        _size(of_scale) in (count, count * num_out)
        and of_scale[-1:] in ((1,), (num_out,), (count,))
    )


def _fits(shape: tuple[int, ...], of_scale: tuple[int, ...], block: tuple[int, int]) -> bool:
    *outer, num_out, num_in = shape
    return of_scale == (*outer, -(-num_out // block[0]), -(-num_in // block[1]))


def _block(quantization: Quantization | None, args: Config) -> tuple[int, int] | None:
    if quantization is None:
        return None
    if str(quantization.get("quant_algo")).lower() == "fp8_pb_wo":
        return (128, 128)
    stated: Any = quantization.get("weight_block_size") or args.get("block_structure")
    if isinstance(stated, str):  # "128x128", in older compressed-tensors files
        stated = stated.split("x")
    return None if not stated else (int(stated[0]), int(stated[1]))


def _scheme(name: str, quantization: Quantization | None) -> Config:
    """Returns compressed-tensors' `weights` arguments for a weight; empty for other methods.

    Raises ModelLoadError if there are several groups and none targets the weight.
    """
    if quantization is None:
        return {}
    if quantization.method == "modelopt":
        return (
            {"group_size": quantization.get("group_size")}
            if quantization.get("quant_algo") == "NVFP4"
            else {}
        )
    groups = quantization.get("config_groups") or {}
    schemes = [group for group in groups.values() if isinstance(group, Mapping)]
    module = name.removesuffix(".weight")
    exact = [
        g for g in schemes if Entries.of(tuple(g.get("targets") or ())).naming(module) is not None
    ]
    by_class = [g for g in schemes if any(_is_class(t) for t in g.get("targets") or ())]
    for group in (*exact, *by_class, *(schemes if len(schemes) == 1 else ())):
        return {k: v for k, v in (group.get("weights") or {}).items() if v is not None}
    if schemes:
        raise ModelLoadError(
            f"{name} is quantized, but no group of quantization_config targets it: use the "
            "config.json of the same checkpoint."
        )
    return {}


def _is_class(target: str) -> bool:
    """Whether a target is a class of modules, such as "Linear"."""
    return "." not in target and not target.startswith("re:") and target[:1].isupper()


def _check_symmetric(name: str, has_zeros: bool, args: Config) -> None:
    symmetric = args.get("symmetric")
    if symmetric is not None and bool(symmetric) == has_zeros:
        found = "has zero points" if has_zeros else "has no zero points"
        raise contradiction(name, found, f"symmetric={str(symmetric).lower()}")
