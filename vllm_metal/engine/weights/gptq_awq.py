# SPDX-License-Identifier: Apache-2.0
"""Reads GPTQ and AWQ, also as written by AutoRound: recognizes and checks their tensors."""

from __future__ import annotations

import re

import mlx.core as mx

from vllm_metal.engine.weights import integers
from vllm_metal.engine.weights.packed import Weight
from vllm_metal.engine.weights.plan import Arrays, StoredWeight
from vllm_metal.engine.weights.quantization import Config, Quantization, matches
from vllm_metal.engine.weights.tensors import Tensors, check_groups, contradiction, group_size
from vllm_metal.identity.model_files import ModelLoadError

#: Rows of AWQ's "gemv" have a multiple of these words, by group size (AutoAWQ's `gemv.py`).
_GEMV_WORDS = {32: 4, 64: 2}


def gptq_or_awq(
    name: str, tensors: Tensors, quantization: Quantization | None
) -> StoredWeight | None:
    """Returns the weight that tensor `name` belongs to, if stored as GPTQ or AWQ."""
    module = name.removesuffix(".qweight")
    if module == name:
        return None
    weight, scales = f"{module}.weight", f"{module}.scales"
    if quantization is None or quantization.method not in ("gptq", "awq", "auto-round"):
        raise ModelLoadError(
            f"{weight} is stored as GPTQ or AWQ, but config.json sets no such quant_method: use "
            "the config.json of the same checkpoint."
        )
    if scales not in tensors:
        raise ModelLoadError(f"{weight} has no {scales}: download the checkpoint again.")
    parts = tensors.parts(
        values=name, scales=scales, zeros=f"{module}.qzeros", g_idx=f"{module}.g_idx"
    )
    settings = _module_settings(module, quantization)
    size = group_size(settings)
    if quantization.method == "awq" and str(quantization.get("version")).lower() == "gemv":
        return _awq_by_rows(weight, parts, tensors, size)
    rows, columns = tensors.shape(name)
    groups, num_out = tensors.shape(scales)
    by_columns = columns * 8 == num_out  # AWQ packs 8 columns in a word, GPTQ rows
    named = quantization.method
    if named == "auto-round":
        named = "awq" if str(quantization.get("packing_format")).endswith("awq") else "gptq"
    if by_columns == (named == "gptq"):
        raise contradiction(weight, f"is stored as {'AWQ' if by_columns else 'GPTQ'}", named)
    bits = int(settings.get("bits") or settings.get("w_bit") or 4)
    num_in = rows if by_columns else rows * 32 // bits
    if "g_idx" in parts and tensors.shape(parts["g_idx"]) != (num_in,):
        raise contradiction(
            weight, f"has {tensors.shape(parts['g_idx'])[0]} inputs", f"bits={bits}"
        )
    if "zeros" in parts and tensors.shape(parts["zeros"]) != (groups, num_out * bits // 32):
        shape = list(tensors.shape(parts["zeros"]))
        raise contradiction(weight, f"has zeros of {shape} for {num_out} outputs", f"bits={bits}")
    check_groups(weight, num_in, groups, size)
    if by_columns:
        return StoredWeight(
            weight,
            "AWQ",
            parts,
            lambda a, t: integers.awq(a["values"], a["scales"], a.get("zeros"), t, size),
        )
    less_one = quantization.get("checkpoint_format", "gptq") != "gptq_v2"
    symmetric = bool(settings.get("sym", False))

    def convert(a: Arrays, dtype: mx.Dtype) -> Weight:
        given = (a["values"], a["scales"], a.get("zeros"), a.get("g_idx"))
        return integers.gptq(*given, bits, less_one, symmetric, dtype, size)

    return StoredWeight(weight, f"GPTQ, {bits} bits", parts, convert)


def _awq_by_rows(
    weight: str, parts: dict[str, str], tensors: Tensors, size: int | None
) -> StoredWeight:
    """Reads AWQ's version "gemv", in which rows of scales and zeros are padded."""
    num_out, words = tensors.shape(parts["values"])
    num_in = words * 8
    groups = 1 if size is None else num_in // size
    multiple = 8 * _GEMV_WORDS.get(size or num_in, 1)
    expected = (num_out, -(-groups // multiple) * multiple)
    scales_shape = tensors.shape(parts["scales"])
    zeros_shape = tensors.shape(parts["zeros"]) if "zeros" in parts else None
    if (
        num_in % groups
        or scales_shape != expected
        or zeros_shape not in (None, (num_out, expected[1] // 8))
    ):
        raise contradiction(
            weight,
            f"has scales of {list(scales_shape)} for {num_in} inputs",
            f"version=gemv and group_size={size or -1}",
        )
    return StoredWeight(
        weight,
        "AWQ",
        parts,
        lambda a, t: integers.awq_by_rows(a["values"], a["scales"], a.get("zeros"), t, size),
    )


def _module_settings(module: str, quantization: Quantization) -> Config:
    """Returns a module's settings, with GPTQ's `dynamic` rules or AutoRound's `extra_config`."""
    settings = dict(quantization.settings)
    for rule, changes in (quantization.get("dynamic") or {}).items():
        pattern = rule.removeprefix("+:").removeprefix("-:")
        if not re.match(pattern, module):
            continue
        if rule.startswith("-:"):
            raise contradiction(module, "is quantized", f"dynamic rule {rule!r}")
        return settings | dict(changes or {})
    for entry, changes in (quantization.get("extra_config") or {}).items():
        named = matches(entry, module) or (set(entry) & set("^$*\\(") and re.match(entry, module))
        if named:
            if int(changes.get("bits", 0) or 0) >= 16:
                raise contradiction(module, "is quantized", f"extra_config {entry!r}")
            return settings | dict(changes)
    return settings
