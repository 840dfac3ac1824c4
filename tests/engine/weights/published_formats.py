# SPDX-License-Identifier: Apache-2.0
"""Writes and reads weights in published quantization formats, with code that is not ours.

compressed-tensors' compressors write and decompress; vLLM's utilities pack GPTQ and AWQ; torch has
FP8; transformers decodes MXFP4's blocks. If a library only packs, the values come from the format's
formula in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from compressed_tensors.compressors import (
    IntQuantizationCompressor,
    MXFP4PackedCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
    unpack_fp4_from_uint8,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, gptq_pack, pack_cols


@dataclass(frozen=True)
class Stored:
    """A weight in a format."""

    tensors: dict[str, torch.Tensor]  # by suffix after the module's name
    dense: torch.Tensor  # [out, in] float64: the represented values


@dataclass(frozen=True)
class Format:
    """A format and its settings."""

    quantization: dict[str, Any]  # in config.json
    store: Callable[[torch.Tensor], Stored]  # takes an [out, in] float32 weight
    error: float = 1e-6  # maximum error relative to the weights' rms, in float32
    #: Additional error with a 16-bit dtype of scales: float16, bfloat16.
    rounding: tuple[float, float] = (2e-3, 1.6e-2)


def fp8(weight: torch.Tensor, block: tuple[int, int] | None, powers: bool, name: str) -> Stored:
    """Stores E4M3 with a scale per block; a block of (1, 0) is a row, None the tensor."""
    num_out, num_in = weight.shape
    rows, columns = (num_out, num_in) if block is None else (block[0], block[1] or num_in)
    down, along = -(-num_out // rows), -(-num_in // columns)
    padded = torch.zeros(down * rows, along * columns)
    padded[:num_out, :num_in] = weight
    tiles = padded.reshape(down, rows, along, columns)
    scale = tiles.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448
    if powers:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    dense = (codes.double() * scale.double()[:, None, :, None]).reshape(padded.shape)
    codes = codes.reshape(padded.shape)[:num_out, :num_in].contiguous()
    stored = scale.reshape(()) if block is None else scale
    return Stored({"weight": codes, name: stored}, dense[:num_out, :num_in])


def deepseek(weight: torch.Tensor, store: Callable[[torch.Tensor], Stored]) -> Stored:
    """Stores as DeepSeek V4: its names, exponents in a dtype of their own, and signed bytes."""
    found = store(weight)
    values, scales = found.tensors.values()
    if scales.dtype != torch.uint8:
        scales = (torch.log2(scales) + 127).to(torch.uint8)
    stored = {"weight": values, "scale": scales.view(torch.float8_e8m0fnu)}
    if values.dtype == torch.uint8:
        stored["weight"] = values.view(torch.int8)
    return Stored(stored, found.dense)


def compressed(weight: torch.Tensor, compressor: Any, **args: Any) -> Stored:
    """Stores and decompresses with a compressor of compressed-tensors."""
    given = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=given)
    num_out, num_in = weight.shape
    state: dict[str, torch.Tensor] = {"weight": weight}
    if given.type == "float":
        by = given.group_size
        largest = weight.reshape(num_out, -1, by).abs().amax(-1)
        if compressor is NVFP4PackedCompressor:
            state["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
            scale = largest / 6 * state["weight_global_scale"]
            state["weight_scale"] = scale.to(torch.float8_e4m3fn).float()
        else:
            state["weight_scale"] = torch.exp2(torch.floor(torch.log2(largest)) - 2)
    else:
        by = given.group_size or num_in
        groups = weight.reshape(num_out, -1, by)
        steps = 2**given.num_bits - 1
        if given.symmetric:
            scale = groups.abs().amax(-1) / (steps / 2)
            zeros = torch.zeros_like(scale, dtype=torch.int8)
        else:
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scale = (high - low) / steps
            zeros = (torch.round(-low / scale) - 2 ** (given.num_bits - 1)).to(torch.int8)
        state |= {"weight_scale": scale.bfloat16().float(), "weight_zero_point": zeros}
        if given.actorder == "group":
            order = torch.randperm(num_in, generator=torch.Generator().manual_seed(3))
            state["weight_g_idx"] = (order // by).int()
    stored = compressor.compress(state, scheme)
    stored = {name: tensor for name, tensor in stored.items() if tensor is not None}
    if compressor is NVFP4PackedCompressor:  # decompresses in bfloat16
        values = unpack_fp4_from_uint8(stored["weight_packed"], num_out, num_in, torch.float32)
        scale = stored["weight_scale"].double() / stored["weight_global_scale"].double()
        dense = values.double() * scale.repeat_interleave(given.group_size, 1)
    else:
        dense = compressor.decompress(dict(stored), scheme)["weight"]
    return Stored({n: t.contiguous() for n, t in stored.items()}, dense.double())


def _integers(
    weight: torch.Tensor, bits: int, by: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns [in, out] integers, [groups, out] scales in float16, and zeros."""
    columns = weight.T.reshape(-1, by, weight.shape[0])
    steps = 2**bits - 1
    if symmetric:
        scales = (columns.abs().amax(1) / (steps / 2)).half()
        zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.int32)
    else:
        low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
        scales = ((high - low) / steps).half()
        zeros = torch.round(-low / scales).int().clamp(1, steps)
    values = torch.round(columns / scales[:, None]) + zeros[:, None]
    return values.clamp(0, steps).int().reshape(weight.T.shape), scales, zeros


def _stream(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs bits along columns: [n, columns] to [n * bits / 32, columns] int32."""
    each = (values.numpy()[:, None] >> np.arange(bits)[None, :, None]) & 1
    stream = each.reshape(-1, 32, values.shape[1]).astype(np.uint64)
    words = (stream << np.arange(32, dtype=np.uint64)[None, :, None]).sum(1)
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def gptq(
    weight: torch.Tensor,
    bits: int,
    by: int,
    symmetric: bool = True,
    less_one: bool = True,
    act_order: bool = False,
) -> Stored:
    """Stores in GPTQ's layout: a bit stream along columns."""
    num_out, num_in = weight.shape
    order = torch.arange(num_in)
    if act_order:
        order = torch.randperm(num_in, generator=torch.Generator().manual_seed(3))
    values, scales, zeros = _integers(weight[:, order], bits, by, symmetric)
    g_idx = torch.empty(num_in, dtype=torch.int32)
    g_idx[order] = torch.arange(num_in, dtype=torch.int32) // by
    back = torch.argsort(order)
    dense = (
        values.double() - zeros.double().repeat_interleave(by, 0)
    ) * scales.double().repeat_interleave(by, 0)
    values = values[back].contiguous()
    stored_zeros = zeros - int(less_one)
    if bits < 4:  # vLLM's utilities pack for its kernels
        packed, packed_zeros = _stream(values, bits), _stream(stored_zeros.T, bits).T
    else:
        packed = gptq_pack(values, bits, num_in, num_out)
        packed_zeros = pack_cols(stored_zeros, bits, *stored_zeros.shape)
    tensors = {"qweight": packed, "scales": scales, "qzeros": packed_zeros, "g_idx": g_idx}
    return Stored({n: t.contiguous() for n, t in tensors.items()}, dense[back].T)


def awq(weight: torch.Tensor, by: int) -> Stored:
    """Stores in AWQ's layout: words along outputs, in AWQ's order."""
    num_out, num_in = weight.shape
    values, scales, zeros = _integers(weight, 4, by, False)
    dense = (
        values.double() - zeros.double().repeat_interleave(by, 0)
    ) * scales.double().repeat_interleave(by, 0)
    tensors = {
        "qweight": awq_pack(values, 4, num_in, num_out),
        "scales": scales,
        "qzeros": awq_pack(zeros, 4, *zeros.shape),
    }
    return Stored({n: t.contiguous() for n, t in tensors.items()}, dense.T)


def awq_gemv(weight: torch.Tensor, by: int) -> Stored:
    """Stores as AutoAWQ's WQLinear_GEMV: words along inputs, in order, with padding groups."""
    num_out, num_in = weight.shape
    values, scales, zeros = _integers(weight, 4, by, False)
    dense = (
        values.double() - zeros.double().repeat_interleave(by, 0)
    ) * scales.double().repeat_interleave(by, 0)
    times = {32: 4, 64: 2}.get(by, 1)
    width = 8 * times * math.ceil(math.ceil(num_in // by / 8) / times)
    room = (0, width - num_in // by)
    zeros = torch.nn.functional.pad(zeros.T, room).contiguous()
    tensors = {
        "qweight": pack_cols(values.T.contiguous(), 4, num_out, num_in),
        "scales": torch.nn.functional.pad(scales.T, room),
        "qzeros": pack_cols(zeros, 4, num_out, width),
    }
    return Stored({n: t.contiguous() for n, t in tensors.items()}, dense.T)


def modelopt_nvfp4(weight: torch.Tensor) -> Stored:
    """Stores compressed-tensors' NVFP4 under modelopt's names, with a multiplied global scale."""
    stored = compressed(weight, NVFP4PackedCompressor, **_NVFP4)
    tensors = {
        "weight": stored.tensors["weight_packed"],
        "weight_scale": stored.tensors["weight_scale"],
        "weight_scale_2": (1 / stored.tensors["weight_global_scale"]).reshape(()),
        "input_scale": torch.tensor(0.01),
    }
    return Stored(tensors, stored.dense)


_NVFP4: dict[str, Any] = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
}
_MXFP4 = {**_NVFP4, "strategy": "group", "group_size": 32}


def _groups(layout: str, **args: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": args, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _packed(**args: Any) -> Format:
    args = {"type": "int", "symmetric": True, "strategy": "group", "group_size": 32, **args}
    if args["strategy"] == "channel":
        args["group_size"] = None
    store = partial(compressed, compressor=PackedQuantizationCompressor, **args)
    return Format(_groups("pack-quantized", **args), store)


def _fp8(block: tuple[int, int] | None, powers: bool = False, **settings: Any) -> Format:
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **settings}
    by_block = block is not None and block[1] > 0
    if by_block:
        said["weight_block_size"] = list(block)
    if powers:
        said["scale_fmt"] = "ue8m0"
    store = partial(
        fp8, block=block, powers=powers, name="weight_scale_inv" if by_block else "weight_scale"
    )
    exact = powers or not by_block
    # 5.5e-3 for normally distributed weights; outliers widen their groups.
    return Format(said, store, 1e-6 if exact else 1e-2)


def _gptq(**args: Any) -> Format:
    said = {
        "quant_method": "gptq",
        "bits": args["bits"],
        "group_size": args["by"],
        "sym": args.get("symmetric", True),
        "desc_act": args.get("act_order", False),
        "checkpoint_format": "gptq" if args.get("less_one", True) else "gptq_v2",
    }
    return Format(said, partial(gptq, **args))


_INT8: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FORMATS: dict[str, Format] = {
    "fp8 blocks of 128": _fp8((128, 128)),
    "fp8 blocks of 32x64": _fp8((32, 64)),
    "fp8 blocks of 128, powers of two": _fp8((128, 128), True),
    "fp8 rows": _fp8((1, 0)),
    "fp8 tensor": _fp8(None),
    "compressed 4 bits": _packed(num_bits=4),
    "compressed 4 bits, zeros": _packed(num_bits=4, symmetric=False),
    "compressed 4 bits, rows": _packed(num_bits=4, strategy="channel"),
    "compressed 4 bits, ordered": _packed(num_bits=4, actorder="group"),
    "compressed 3 bits": _packed(num_bits=3),
    "compressed 5 bits, zeros": _packed(num_bits=5, symmetric=False),
    "compressed 6 bits": _packed(num_bits=6),
    "compressed 7 bits": _packed(num_bits=7),
    "compressed 8 bits": _packed(num_bits=8),
    "compressed int8": Format(
        _groups("int-quantized", **_INT8),
        partial(compressed, compressor=IntQuantizationCompressor, **_INT8),
    ),
    "compressed nvfp4": Format(
        _groups("nvfp4-pack-quantized", **_NVFP4),
        partial(compressed, compressor=NVFP4PackedCompressor, **_NVFP4),
    ),
    "compressed mxfp4": Format(
        _groups("mxfp4-pack-quantized", **_MXFP4),
        partial(compressed, compressor=MXFP4PackedCompressor, **_MXFP4),
    ),
    "modelopt nvfp4": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, modelopt_nvfp4
    ),
    "modelopt fp8": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        partial(fp8, block=None, powers=False, name="weight_scale"),
    ),
    "gptq 4 bits": _gptq(bits=4, by=32),
    "gptq 4 bits, zeros": _gptq(bits=4, by=64, symmetric=False),
    "gptq 4 bits, v2": _gptq(bits=4, by=32, symmetric=False, less_one=False),
    "gptq 4 bits, ordered": _gptq(bits=4, by=32, act_order=True),
    "gptq 2 bits": _gptq(bits=2, by=32),
    "gptq 3 bits": _gptq(bits=3, by=32, symmetric=False),
    "gptq 8 bits": _gptq(bits=8, by=64),
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        partial(awq, by=32),
    ),
    "awq gemv": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemv"},
        partial(awq_gemv, by=32),
    ),
    "auto-round": Format(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "packing_format": "auto_round:auto_gptq",
            "data_type": "int",
        },
        partial(gptq, bits=4, by=32),
    ),
    "auto-round as awq": Format(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 64,
            "sym": False,
            "packing_format": "auto_round:auto_awq",
        },
        partial(awq, by=64),
    ),
}
for _name, _block in {
    "fp8 blocks of 128": (128, 128),
    "fp8 blocks of 32": (32, 32),
    "fp8 groups of 32": (1, 32),
    "mxfp4": (32, 32),
}.items():
    _form = _fp8(_block, True)
    _store = FORMATS["compressed mxfp4"].store if _name == "mxfp4" else _form.store
    FORMATS[f"deepseek {_name}"] = Format(_form.quantization, partial(deepseek, store=_store))


def weight_of(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Draws values with outliers in a few columns and rows of very different scale."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    weight[:, :: shape[1] // 3] *= 12
    return weight * torch.exp2(torch.randint(-3, 3, (shape[0], 1), generator=generator))
