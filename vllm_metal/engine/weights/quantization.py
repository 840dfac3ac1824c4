# SPDX-License-Identifier: Apache-2.0
"""Quantization: a folder's description of how its weights were quantized."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any

from vllm_metal.identity.model_files import ModelLoadError

Config = Mapping[str, Any]
#: Supported methods, and their names here.
METHODS = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "mxfp8": "fp8",
    "deepseek_v4_fp8": "fp8",  # vLLM's name of it for these families
    "compressed-tensors": "compressed-tensors",
    "modelopt": "modelopt",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "gptq": "gptq",
    "auto_gptq": "gptq",
    "gptqmodel": "gptq",
    "awq": "awq",
    "auto_awq": "awq",
    "auto-round": "auto-round",
    "intel/auto-round": "auto-round",
    "mxfp4": "mxfp4",
    "gpt_oss_mxfp4": "mxfp4",
}
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_REMEDY = (
    "Choose a checkpoint in bf16, FP8, NVFP4, MXFP4, GPTQ, AWQ or compressed-tensors, or one that "
    "mlx-lm has quantized"
)


@dataclass(frozen=True)
class Quantization:
    """A folder's `quantization_config`, from config.json or modelopt's hf_quant_config.json."""

    method: str  # a value of METHODS
    settings: Config
    ignored: tuple[str, ...] = ()  # modules declared unquantized, as written

    @staticmethod
    def read(config: Config, folder: Path | None = None) -> Quantization | None:
        """Reads the description in config.json, or in modelopt's hf_quant_config.json in `folder`.

        Returns None without one, or with MLX's own `quantization`. Raises what `of` does.
        """
        if config.get("quantization"):
            return None
        text = config.get("text_config") or {}  # some multimodal checkpoints have it there
        for stated in (config, text):
            for key in ("quantization_config", "compression_config"):
                if stated.get(key):
                    return Quantization.of(stated[key])
        modelopt_file = None if folder is None else folder / "hf_quant_config.json"
        if modelopt_file is not None and modelopt_file.is_file():
            return Quantization.of(
                {"quant_method": "modelopt", **json.loads(modelopt_file.read_bytes())}
            )
        return None

    @staticmethod
    def of(stated: Config) -> Quantization:
        """Reads a `quantization_config`.

        Raises ModelLoadError: its method or its format is not supported.
        """
        inner = stated.get("quantization")  # modelopt nests it in hf_quant_config.json
        settings = {**stated, **inner} if isinstance(inner, Mapping) else dict(stated)
        producer = stated.get("producer")
        made_by = producer.get("name") if isinstance(producer, Mapping) else None
        name = (
            str(settings.get("quant_method") or made_by or "")
            .lower()
            .replace("_tensors", "-tensors")
        )
        if name not in METHODS:
            raise ModelLoadError(
                f"quantization_config with quant_method={name!r} is not supported: there is no "
                f"translation of this format to MLX. {_REMEDY}."
            )
        method = METHODS[name]
        _check(method, settings)
        return Quantization(method, settings, tuple(_ignored(settings)))

    def get(self, key: str, default: Any = None) -> Any:
        value = self.settings.get(key)
        return default if value is None else value

    def ignores(self, module: str) -> str | None:
        """Returns the entry that declares a module unquantized, if any."""
        return Entries.of(self.ignored).naming(module)


@dataclass(frozen=True)
class Entries:
    """Module names in a configuration: paths, wildcards, or regular expressions after "re:".

    Paths may include the prefixes of enclosing models or omit them.
    """

    paths: Mapping[str, str]  # entries by path without enclosing models
    patterns: tuple[tuple[str, re.Pattern[str]], ...]  # entries and their patterns

    @staticmethod
    @cache
    def of(entries: tuple[str, ...]) -> Entries:
        paths, patterns = {}, []
        for entry in entries:
            if entry.startswith("re:"):
                patterns.append((entry, re.compile(entry[3:])))
            elif "*" in entry:
                patterns.append((entry, re.compile(translate(entry))))
            else:
                paths[_bare(entry)] = entry
        return Entries(paths, tuple(patterns))

    def naming(self, module: str) -> str | None:
        """Returns the entry (a name, or a regular expression with re:) that matches a module."""
        bare = _bare(module)
        if (entry := self.paths.get(bare)) is not None:
            return entry
        names = (module, *(f"{prefix}{bare}" for prefix in _PREFIXES))
        return next(
            (entry for entry, pattern in self.patterns if any(map(pattern.match, names))), None
        )


def matches(entry: str, module: str) -> bool:
    """Whether an entry matches a module, see Entries."""
    return Entries.of((entry,)).naming(module) is not None


def _bare(module: str) -> str:
    """Drops the prefixes of enclosing models from a module's path."""
    return next(module.removeprefix(p) for p in _PREFIXES if module.startswith(p))


def _ignored(settings: Config) -> Iterator[str]:
    for key in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        yield from (str(entry) for entry in settings.get(key) or ())


def _check(method: str, settings: Config) -> None:
    for key, served, methods in _SERVED:
        value = settings.get(key)
        if method in methods and value is not None and not served(value):
            raise ModelLoadError(
                f"quantization_config with {key}={_short(value)} is not supported with "
                f"quant_method={settings.get('quant_method')}: there is no translation to MLX of "
                f"this layout, which all quantized layers have. {_REMEDY}."
            )


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _one_of(*values: Any) -> Any:
    return lambda value: (value.lower() if isinstance(value, str) else value) in values


_ALGORITHMS = (
    *("fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "nvfp4", "mxfp8", "mixed_precision"),
    *("w4a16_nvfp4", "w4a8_nvfp4_fp8"),
)
#: Keys, a test of their values, and the methods that they apply to.
_SERVED: tuple[tuple[str, Any, Iterable[str]], ...] = (
    ("checkpoint_format", _one_of("gptq", "gptq_v2"), ("gptq",)),
    ("bits", _one_of(2, 3, 4, 8), ("gptq", "auto-round")),
    ("bits", _one_of(4), ("awq",)),
    ("w_bit", _one_of(4), ("awq",)),
    ("version", _one_of("gemm", "gemv"), ("awq",)),
    ("pack_dtype", _one_of("int32"), ("gptq",)),
    ("data_type", _one_of("int"), ("auto-round",)),
    (
        "packing_format",
        _one_of("auto_round:auto_gptq", "auto_round:gptq", "auto_round:auto_awq", "auto_round"),
        ("auto-round",),
    ),
    ("quant_algo", _one_of(*_ALGORITHMS), ("modelopt",)),
    ("fmt", _one_of("e4m3", "float8_e4m3fn"), ("fp8",)),
    (
        "format",
        _one_of(
            *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
            *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
            *("mixed-precision", "dense"),
        ),
        ("compressed-tensors",),
    ),
    (
        "sparsity_config",
        lambda value: not value or value.get("format") in (None, "dense"),
        ("compressed-tensors",),
    ),
    (
        "transform_config",
        lambda value: not value or not value.get("config_groups"),
        ("compressed-tensors",),
    ),
    (
        "quantization_status",
        _one_of("compressed", "frozen", "initialized", "calibration"),
        ("compressed-tensors",),
    ),
)
