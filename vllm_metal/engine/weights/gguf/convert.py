# SPDX-License-Identifier: Apache-2.0
"""Converts a GGUF file to a model directory that mlx-lm and vLLM load."""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import split_state_dict_into_shards_factory
from tqdm import tqdm

from .config import generation_config, model_config
from .families import family_of
from .safetensors import safetensors_file
from .source import ConversionError, GGUFSource
from .tokenizer import copy_tokenizer, write_tokenizer
from .weights import DType, Weight, natural_dtype, plan_weights, quantization_config

MAX_SHARD_BYTES = 5 * 10**9
"""Maximum size of a weight file; mlx-lm splits at the same size."""


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion; the defaults keep the file's numbers exactly."""

    dtype: DType | None = None
    """Element type of dense weights and of scales; None for the file's or the family's."""
    blocks: Literal["keep", "dequantize"] = "keep"
    """Storage of matrices in Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0."""
    kquants: Literal["dequantize", "requantize"] = "dequantize"
    """Storage of matrices in Q2_K to Q6_K."""
    bits: Literal[4, 8] = 4
    """Bits per weight of requantized K-quants."""
    tokenizer: Path | None = None
    """Directory to copy the tokenizer from, instead of building it from the file."""
    force: bool = False
    """Whether to replace an existing directory."""
    max_shard_bytes: int = MAX_SHARD_BYTES
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Default sampling parameters, by their names in generation_config.json."""


def convert(gguf: Path, out: Path, options: ConvertOptions | None = None) -> Path:
    """Converts the model file `gguf` into the directory `out` and returns `out`.

    Writes to a hidden directory next to `out` and renames it at the end, so that a failed
    conversion leaves nothing behind.

    Raises:
        ConversionError: the file cannot be converted, or not with these options.
        FileExistsError: `out` exists, and `force` is not set.
    """
    options = options or ConvertOptions()
    out = out.absolute()
    if not options.force and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} already exists; pass --force to replace it")
    source = GGUFSource(gguf)
    family = family_of(source)
    dtype = options.dtype or natural_dtype(source, family)
    if dtype == "float16" and family.default_dtype != "float16":
        raise ConversionError(
            f"{gguf}: {source.architecture} overflows float16; use --dtype bfloat16 or float32"
        )
    kquant_bits = options.bits if options.kquants == "requantize" else None
    plan = plan_weights(source, family, dtype, options.blocks == "keep", kquant_bits)
    config = model_config(source, family, dtype)
    if quantization := quantization_config(plan):
        config["quantization"] = quantization
    with _explain_full_disk(out, plan), _atomic_directory(out) as partial:
        if options.tokenizer:
            copy_tokenizer(options.tokenizer, partial)
        else:
            write_tokenizer(source, partial)
        _write_json(partial / "config.json", config)
        generation = {**generation_config(source), **options.sampling}
        _write_json(partial / "generation_config.json", generation)
        _write_weights(plan, partial, options.max_shard_bytes)
    return out


@contextmanager
def _explain_full_disk(out: Path, plan: list[Weight]) -> Iterator[None]:
    """Turns a "no space left" error, which names no file, into one that names the disk."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        size = sum(weight.num_bytes for weight in plan)
        raise ConversionError(
            f"{out}: the disk is full; the model needs {size / 1e9:.2f} GB there, so free some "
            "space or choose another folder"
        ) from error


@contextmanager
def _atomic_directory(out: Path) -> Iterator[Path]:
    """Yields a new directory, renamed to `out` after success and deleted after an error."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    old = out.parent / f".{out.name}.old-{os.getpid()}"
    try:
        partial.mkdir()
        yield partial
        if out.exists():
            out.rename(old)
        partial.rename(out)
    finally:
        if old.exists() and not out.exists():
            old.rename(out)
        for leftover in (partial, old):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink(missing_ok=True)


def _write_weights(plan: list[Weight], out: Path, max_shard_bytes: int) -> None:
    weights = {weight.stored[0].name: weight for weight in plan}
    split = split_state_dict_into_shards_factory(
        weights,
        get_storage_size=lambda weight: weight.num_bytes,  # includes its scales
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    total = sum(weight.source.data.nbytes for weight in plan)
    weight_map: dict[str, str] = {}
    # tqdm draws on stderr: shells read the path that `vllm-metal model` prints to stdout.
    with tqdm(total=total, desc="Converting", unit="B", unit_scale=True, leave=False) as bar:
        for file, names in split.filename_to_tensors.items():
            shard = [weights[name] for name in names]
            stored = [tensor for weight in shard for tensor in weight.stored]
            weight_map |= {tensor.name: file for tensor in stored}
            with safetensors_file(out / file, stored) as write:
                for weight in shard:
                    for row, parts, read in weight.rows():
                        for name, values in parts.items():
                            write(name, row, values)
                        bar.update(read)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": weight_map}
        _write_json(out / "model.safetensors.index.json", index)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
