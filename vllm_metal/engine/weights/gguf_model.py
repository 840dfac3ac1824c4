# SPDX-License-Identifier: Apache-2.0
"""Serves GGUF models: creates the small folder that stands for one, and plans its weights.

The folder has what vLLM and mlx-lm read besides weights: config.json, generation_config.json and
the tokenizer. Weights are read from the GGUF file.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
import numpy as np

from vllm_metal.engine.weights import gguf_blocks, lazy
from vllm_metal.engine.weights.gguf.config import generation_config, model_config
from vllm_metal.engine.weights.gguf.families import served_family
from vllm_metal.engine.weights.gguf.family import Family
from vllm_metal.engine.weights.gguf.names import (
    Order,
    input_order,
    joined_order,
    row_order,
    served_names,
    stem_of,
)
from vllm_metal.engine.weights.gguf.source import ConversionError, GGUFSource
from vllm_metal.engine.weights.gguf.tokenizer import write_tokenizer
from vllm_metal.engine.weights.gguf.weights import natural_dtype
from vllm_metal.engine.weights.gguf_blocks import EXACT, FLOATS, Convert
from vllm_metal.engine.weights.packed import Packed, Weight, requantized, stacked
from vllm_metal.engine.weights.plan import Arrays, Plan, StoredWeight
from vllm_metal.identity.facts import NOT_IN_ENGINE, sources
from vllm_metal.identity.model_files import (
    GGUF_CONVERSION,
    GGUF_FILES,
    ModelLoadError,
    weight_files,
)
from vllm_metal.settings.envs import GGUFInexact


def folder_of(file: Path, root: Path, inexact: GGUFInexact, tokenizer: bool = True) -> Path:
    """Returns the folder that represents a GGUF model; creates it if missing.

    Args:
        file: the model, or any of its parts.
        root: parent of all such folders.
        inexact: representation of matrices of types without an MLX packing.
        tokenizer: whether to write the file's tokenizer.

    Raises:
        ModelLoadError: the file is damaged or not a language model, or its family, a tensor or its
            tokenizer is not supported.
    """
    try:
        source = GGUFSource(file)
        family = served_family(source)
        config = model_config(source, family, natural_dtype(source, family))
        served_names(family, source)
        _check_types(source)
        out = root / _name(source, inexact, tokenizer)
        if out.is_dir():
            return out
        root.mkdir(parents=True, exist_ok=True)
        partial = Path(mkdtemp(prefix=".partial-", dir=root))
        # Written elsewhere and renamed, so that other processes never see a part of it.
        try:
            if tokenizer:
                write_tokenizer(source, partial)
            _write(partial / "config.json", config)
            _write(partial / "generation_config.json", generation_config(source))
            _write(partial / GGUF_CONVERSION, {"inexact": inexact})
            _write(partial / GGUF_FILES, [str(path.absolute()) for path in source.files])
            _rename(partial, out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except ConversionError as error:
        raise ModelLoadError(f"{error}.") from error
    return out


def _check_types(source: GGUFSource) -> None:
    kinds = {tensor.kind: tensor.name for tensor in source.tensors.values()}
    for kind, name in kinds.items():
        if not gguf_blocks.is_readable(kind):
            raise ConversionError(
                f"{source.path}: tensor {name} has type {kind.name}, which is not supported. "
                "Choose a file of another type, such as Q4_K_M"
            )


def opened(folder: Path) -> tuple[dict[str, mx.array], Plan]:
    """Opens a GGUF model: returns its unquantized arrays, and a plan that reads quantized ones.

    `folder` is a result of `folder_of`.

    Raises ModelLoadError: the file is damaged or was changed.
    """
    try:
        source = GGUFSource(weight_files(folder)[0])
        family = served_family(source)
        names = served_names(family, source)
    except ConversionError as error:
        raise ModelLoadError(f"{error}.") from error
    inexact = json.loads((folder / GGUF_CONVERSION).read_bytes())["inexact"]
    arrays: dict[str, lazy.LazyArray] = {}
    weights: dict[str, StoredWeight] = {}
    for target, parts in names.items():
        made = [_part(family, source, name, inexact) for name in parts]
        if len(made) == 1 and made[0].convert is None:
            arrays[target] = made[0].arrays[_VALUES]
            continue
        stored = {str(number): f"{name}.blocks" for number, name in enumerate(parts)}
        kinds = " and ".join(dict.fromkeys(source.tensors[name].kind.name for name in parts))
        convert = _join_parts(made, joined_order(source, parts), stem_of(parts[0]) == "attn_k_b")
        weights[target] = StoredWeight(target, f"GGUF {kinds}", stored, convert)
    found = lazy.arrays_of(arrays)
    # Placeholders: the plan reads these weights itself, one at a time.
    found |= {name: mx.array(0) for each in weights.values() for name in each.tensors.values()}
    for target, parts in names.items():
        if target in found:
            found[target] = _to_mlx_layout(family, parts[0], found[target])
    return found, Plan(weights, {}, (_note(weights, inexact),))


_VALUES = "values"


@dataclass(frozen=True)
class _Part:
    """One tensor's arrays, by name; if `convert` is None, "values" is the weight."""

    arrays: dict[str, lazy.LazyArray]
    convert: Convert | None

    def weight(self, dtype: mx.Dtype) -> Weight:
        arrays = lazy.Reader(self.arrays)
        return arrays[_VALUES] if self.convert is None else self.convert(arrays, dtype)


def _part(family: Family, source: GGUFSource, name: str, inexact: str) -> _Part:
    tensor, order = source.tensors[name], row_order(family, source, name)
    columns = input_order(family, source, name)
    if tensor.kind in FLOATS and columns is None:
        return _Part({_VALUES: gguf_blocks.plain(tensor, order)}, None)
    if tensor.kind in EXACT and len(tensor.shape) > 1:
        arrays, convert = gguf_blocks.exact(tensor, order)
    else:
        packs = inexact == "8bit" and len(tensor.shape) > 1 and tensor.kind not in FLOATS
        arrays, convert = gguf_blocks.decoded(tensor, packs, order)
    return _Part(arrays, convert if columns is None else _with_input_order(convert, columns))


def _to_mlx_layout(family: Family, name: str, array: mx.array) -> mx.array:
    """Converts an unquantized array from llama.cpp's conventions to mlx-lm's."""
    stem = stem_of(name)
    if family.norm_offset and name.endswith("norm.weight"):
        return array - family.norm_offset
    if stem in ("ssm_conv1d", "shortconv.conv") and array.ndim > 1:
        return array[..., None]  # [channels, kernel, 1]
    if stem == "ssm_a":  # GGUF stores -exp(A_log), for Mamba 2 with two axes
        decay = mx.log(-array.astype(mx.float32))
        return decay.reshape(-1) if decay.shape[-1] == 1 else decay
    if stem in ("ssm_d", "ssm_norm", "exp_probs_b"):
        return array.reshape(-1)
    return array


def _join_parts(parts: list[_Part], order: Order | None, is_latent: bool) -> Convert:
    """Returns a function that makes a weight of one or several tensors.

    Args:
        parts: tensors of the weight.
        order: row of the joined parts for each row of the weight; None for the same order.
        is_latent: whether the parts are MLA's keys [heads, rank, size] and values [heads, size,
            rank], to be joined per head: [heads * sizes, rank].
    """

    def convert(arrays: Arrays, dtype: mx.Dtype) -> Weight:
        made = [part.weight(dtype) for part in parts]
        if is_latent:
            weight = _latent_heads(made, dtype)
        else:
            weight = _take_rows(_concat_rows(made, dtype), order)
        lazy.evaluate(gguf_blocks.arrays_in(weight))
        return weight

    return convert


def _concat_rows(weights: list[Weight], dtype: mx.Dtype) -> Weight:
    """Concatenates weights by rows: packed if packings agree, dense if one is, else in 8 bits."""
    packings = {
        (each.mode, each.bits, each.group_size) if isinstance(each, Packed) else None
        for each in weights
    }
    if len(packings) == 1:
        return stacked(weights)
    joined = mx.concatenate([_dense(each, dtype) for each in weights], axis=-2)
    return joined if None in packings else requantized(joined, dtype)


def _latent_heads(weights: list[Weight], dtype: mx.Dtype) -> Weight:
    keys, values = (_dense(each, dtype) for each in weights)
    joined = mx.concatenate([keys.swapaxes(-1, -2), values], axis=-2)
    joined = joined.reshape(-1, joined.shape[-1])
    packs = any(isinstance(each, Packed) for each in weights)
    return requantized(joined, dtype) if packs else joined


def _dense(weight: Weight, dtype: mx.Dtype) -> mx.array:
    return weight.dense(dtype) if isinstance(weight, Packed) else weight


def _take_rows(weight: Weight, order: Order | None) -> Weight:
    if order is None:
        return weight
    rows = mx.array(order.astype(np.int32))
    if not isinstance(weight, Packed):
        return mx.take(weight, rows, axis=-2)
    quantized, scales = (mx.take(each, rows, axis=-2) for each in (weight.quantized, weight.scales))
    biases = None if weight.biases is None else mx.take(weight.biases, rows, axis=-2)
    return replace(weight, quantized=quantized, scales=scales, biases=biases)


def _with_input_order(convert: Convert, columns: Order) -> Convert:
    """Wraps a conversion: column c of the resulting weight multiplies input `columns[c]`."""

    def reordered(arrays: Arrays, dtype: mx.Dtype) -> Weight:
        weight, order = convert(arrays, dtype), mx.array(columns.astype(np.int32))
        if isinstance(weight, Packed):
            return replace(weight, input_order=order)
        return mx.take(weight, mx.argsort(order), axis=-1)

    return reordered


def _note(weights: dict[str, StoredWeight], inexact: str) -> str:
    counts: dict[str, int] = {}
    for weight in weights.values():
        counts[weight.format] = counts.get(weight.format, 0) + 1
    listed = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"Quantized weights: {listed or 'none'}; types without an exact packing: {inexact}"


def _name(source: GGUFSource, inexact: GGUFInexact, tokenizer: bool) -> str:
    # Identifies the content and the code that converts it; files by their size and mtime.
    facts: list[Any] = [sources(NOT_IN_ENGINE), inexact, tokenizer]
    for path in source.files:
        state = path.stat()
        facts.append([str(path.absolute()), state.st_size, state.st_mtime_ns, state.st_ino])
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return f"{source.path.stem[:80]}-{digest}"


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _rename(partial: Path, out: Path) -> None:
    try:
        os.rename(partial, out)
    except OSError:
        if not out.is_dir():  # else another process created it meanwhile
            raise
