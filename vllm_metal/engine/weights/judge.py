# SPDX-License-Identifier: Apache-2.0
"""Plans how to read a folder's weights from its config.json and tensor headers.

The stored tensors determine each weight's format; config.json must agree with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from vllm_metal.engine.weights import readers
from vllm_metal.engine.weights.files import Header
from vllm_metal.engine.weights.plan import Plan, StoredWeight
from vllm_metal.engine.weights.quantization import Config, Quantization
from vllm_metal.engine.weights.tensors import AGAIN, Tensors
from vllm_metal.identity.model_files import ModelLoadError

_EXPERTS = r"(\.|(gate_up_proj|down_proj)_)"
#: Endings of tensor names that are not needed, and why.
_UNUSED = (
    (
        re.compile(
            _EXPERTS
            + r"(input_scale|input_scale_ub|input_global_scale|input_zero_point|activation_scale"
            r"|input_amax|output_scale)$"
        ),
        "activations are not quantized",
    ),
    (
        re.compile(
            r"\.(kv_scale|kv_zero_point|[qkv]_scale|[qkv]_zero_point|[qkv]_bmm_scale"
            r"|prob_output_scale|prob_scale|softmax_scale)$"
        ),
        "--kv-cache-dtype decides how K and V are kept",
    ),
)
#: Endings of tensor names that only quantized weights have.
_QUANTIZED_ONLY = re.compile(
    r"(^|[._])(qweight|qzeros|g_idx|weight_packed|weight_shape|weight_scale|weight_scale_inv"
    r"|weight_scale_2|weight_global_scale|weight_zero_point|weight_g_idx|scale_inv|pre_quant_scale"
    r"|(gate_up_proj|down_proj)_(blocks|scales|scale))$"
)
_CODES = ("F8_E4M3", "I8")  # dtypes that only quantized weights have


def plan_of(config: Config, headers: Mapping[str, Header], folder: Path | None = None) -> Plan:
    """Plans how to read a checkpoint's weights.

    Args:
        config: content of config.json.
        headers: headers of all tensors by name.
        folder: location of an hf_quant_config.json, if any.

    Raises:
        ModelLoadError: a format or its configuration is not supported, or the tensors contradict
            config.json.
    """
    if config.get("quantization"):  # written by MLX's own tools
        return Plan()
    quantization = Quantization.read(config, folder)
    tensors = Tensors(headers)
    weights = {weight.name: weight for weight in _weights(tensors, quantization)}
    taken = {name for weight in weights.values() for name in weight.tensors.values()}
    unused = {}
    if quantization is not None or weights:
        unused = {n: why for n in headers if n not in taken and (why := _why_unused(n))}
    _check_rest(headers, taken | set(unused), quantization)
    _check_ignored(weights, quantization)
    return Plan(weights, unused, tuple(_notes(weights, unused)))


def _weights(tensors: Tensors, quantization: Quantization | None) -> Iterator[StoredWeight]:
    for name in tensors.headers:
        for reader in readers.READERS:
            if (weight := reader(name, tensors, quantization)) is not None:
                yield weight
                break


def _why_unused(name: str) -> str | None:
    return next((why for pattern, why in _UNUSED if pattern.search(name)), None)


def _check_rest(
    headers: Mapping[str, Header], known: set[str], quantization: Quantization | None
) -> None:
    """Rejects tensors of quantized weights that no reader recognized."""
    for name, header in headers.items():
        if name in known:
            continue
        is_quantized = quantization is not None and _QUANTIZED_ONLY.search(name)
        if header.dtype in _CODES or is_quantized:
            method = "no quantization_config" if quantization is None else quantization.method
            raise ModelLoadError(
                f"{name} ({header.dtype}, {list(header.shape)}) is not supported with {method}: it "
                "belongs to a quantized weight whose other tensors are missing, or to a format "
                "that is not served. Choose another checkpoint of the model."
            )


def _check_ignored(weights: Mapping[str, StoredWeight], quantization: Quantization | None) -> None:
    """Rejects quantized weights that config.json declares unquantized."""
    if quantization is None or not quantization.ignored:
        return
    for name, weight in weights.items():
        if (entry := quantization.ignores(name.removesuffix(".weight"))) is not None:
            raise ModelLoadError(
                f"{name} is stored as {weight.format}, but quantization_config excludes {entry!r} "
                f"from quantization: {AGAIN}."
            )


def _notes(weights: Mapping[str, StoredWeight], unused: Mapping[str, str]) -> Iterator[str]:
    counts: dict[str, int] = {}
    for weight in weights.values():
        counts[weight.format] = counts.get(weight.format, 0) + 1
    if counts:
        listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        yield f"Quantized weights: {listed}"
    reasons: dict[str, int] = {}
    for why in unused.values():
        reasons[why] = reasons.get(why, 0) + 1
    for why, count in reasons.items():
        yield f"{count} scales of the checkpoint are not used: {why}"
