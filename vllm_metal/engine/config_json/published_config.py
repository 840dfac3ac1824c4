# SPDX-License-Identifier: Apache-2.0
"""Translates config.json for mlx-lm's modules so that they read it as transformers and vLLM do.

mlx-lm passes a module the keys that its `ModelArgs` name and silently drops all others.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from vllm_metal.engine.config_json import (
    absent_keys,
    config_keys,
    config_refusals,
    fixed_values,
    implied_values,
    nested_blocks,
)
from vllm_metal.engine.config_json.config_rows import ROPE_ROWS, ROWS
from vllm_metal.engine.config_json.derived_values import NOTHING
from vllm_metal.engine.config_json.reference_code import Reference, reference_of
from vllm_metal.engine.config_json.rope_parameters import (
    Config,
)
from vllm_metal.engine.config_json.stored_head import Head
from vllm_metal.identity.model_files import ModelLoadError
from vllm_metal.patches.mlx_patches import mlx_vlm_text
from vllm_metal.patches.mlx_patches.replacing import MLX_LM

Unread = dict[tuple[str, ...], Any]
#: Classes within a module that read its `text_config` if there is no module for the text model.
_TEXT_ARGS = ("TextConfig", "TextModelArgs", "TextArgs")
#: Text modules of multimodal modules without a class for `text_config`.
_TEXT_OF = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "lfm2-vl": "lfm2",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}


def as_read(
    config: Config,
    module: str,
    args: type,
    folder: Path | None = None,
    head: Head | None = None,
) -> dict[str, Any]:
    """Returns keys to change in config.json so that mlx-lm's module reads it as transformers does.

    Logs keys that neither the module nor a reference implementation reads.

    Args:
        config: config.json including --hf-overrides.
        module: the module's name.
        args: its `ModelArgs`.
        folder: the model's folder, if it has code of its own, which then is a reference, too.
        head: storage of the head in the model's files; None: unknown, so config.json decides.

    Raises:
        ModelLoadError: the config contradicts itself, has a value that the module does not support,
            or has a key that the module does not read and that may have an effect.
    """
    reader = _Reader(config, folder, head)
    changed, unread = reader.read(config, module, args)
    library = "mlx-lm" if f"{MLX_LM}{module}" in sys.modules else "mlx-vlm"
    config_keys.judge(unread, module, config, reader.reference, library)
    return changed


@dataclass(frozen=True)
class _Reader:
    """Reads a config.json, and then its `text_config`, if any, as a part of it."""

    config: Config
    folder: Path | None
    head: Head | None

    @property
    def reference(self) -> Reference:
        return reference_of(self.config, self.folder)

    def read(self, config: Config, module: str, args: type) -> tuple[dict[str, Any], Unread]:
        """Returns `as_read`'s result and the keys that the module does not read."""
        if not dataclasses.is_dataclass(args):
            return {}, {}
        read = {field.name for field in dataclasses.fields(args)}
        if "text_config" in read and config.get("text_config") is None:
            # A text model's own configuration, read by a multimodal module.
            inner, inner_args = _text_args(config, module)
            if inner_args is None:
                return {}, {}
            text_changes, unread = self.read(config, inner, inner_args)
            return {"text_config": {**config, **text_changes}}, unread
        is_inner = config is not self.config
        if "text_config" not in read:
            config = nested_blocks.flat(config, module)
        config, tied = self._tied(config, module, read)
        around = self.config if is_inner else {}
        reference = reference_of(config, self.folder, around)
        rope = absent_keys.rope(config, module, read, reference)
        changed, used = _changed({**config, **rope}, module, args, reference)
        changed = {key: rope[key] for key in rope.keys() & read} | changed | tied
        config_refusals.check(config, module, read)
        absent_keys.check(config, module, args, changed, reference)
        unread = {
            (*nested_blocks.path(key, module), *rest): value
            for (key, *rest), value in config_keys.unread(
                config, module, read, used, reference
            ).items()
        }
        if "text_config" in read and isinstance(text := config.get("text_config"), Mapping):
            inner, inner_args = _text_args(text, module)
            if inner_args is not None:
                tied = _tied(config, text, inner_args)
                text_changes, text_unread = self.read({**text, **tied}, inner, inner_args)
                if text_changes := tied | text_changes:  # --hf-overrides replace it as a whole
                    changed["text_config"] = {**text, **text_changes}
                unread |= {("text_config", *path): value for path, value in text_unread.items()}
        return changed, unread

    def _tied(self, config: Config, module: str, read: set[str]) -> tuple[Config, dict[str, bool]]:
        """Sets tie_word_embeddings by what the files store.

        Raises ModelLoadError if they store a separate head and the module has none.
        """
        key = "tie_word_embeddings"
        computed = fixed_values.FIXED.get(module, {}).get(key)
        stated = config.get(key, self.config.get(key))
        if self.head is None or (self.head is Head.NONE and stated is not None):
            return config, {}
        tied = self.head is not Head.OWN and computed != (False,)
        if computed == (True,) and not tied:
            raise ModelLoadError(
                "tie_word_embeddings=false, or lm_head.weight with other values than the embedding,"
                f" is not supported with mlx-lm's module {module!r}: its head is the embedding. "
                "Choose a checkpoint without lm_head.weight"
            )
        if key not in read and computed is None:
            return config, {}
        return {**config, key: tied}, {key: tied} if key in read else {}


def _tied(config: Config, text: Config, args: type) -> dict[str, bool]:
    """Copies tie_word_embeddings to the text model; transformers puts it beside `text_config`."""
    key = "tie_word_embeddings"
    if key in text or key not in _required(args):
        return {}
    return {key: bool(config.get(key))}


def _required(args: type) -> set[str]:
    fields: Any = dataclasses.fields(args)
    return {
        field.name
        for field in fields
        if field.default is field.default_factory is dataclasses.MISSING
    }


def _changed(
    config: Config, module: str, args: type, reference: Reference
) -> tuple[dict[str, Any], set[str]]:
    """Returns keys to change by ROWS and the reference's defaults, and the keys they came from."""
    fields: Any = dataclasses.fields(args)
    read = {field.name for field in fields}
    required = _required(args)
    absent, used = absent_keys.values(config, module, fields, reference)
    stated_or_default = {**reference.declared, **config, **absent}
    changed: dict[str, Any] = {}
    sources: dict[str, set[str]] = {}
    for row in (*ROWS, *(() if module in config_refusals.READ_ROPE else ROPE_ROWS)):
        if row.key not in (required if row.no_default else read):
            continue
        if row.no_default and reference.declared.get(row.key) is not None:
            continue
        if row.families and module not in row.families:
            continue
        asked = implied_values.Asked(stated_or_default)
        value = row.value(asked)
        if value is None:
            sources[row.key] = asked.keys_asked
            continue
        # The reference computes with the row's sources and ignores a key that only mlx-lm reads.
        if row.always or config.get(row.key) is None or not reference.reads(row.key):
            changed[row.key] = None if value is NOTHING else value
            used |= asked.keys_asked
        elif config[row.key] == value:  # both names have the same value
            used |= asked.keys_asked
    changed = absent | changed
    for field in fields:
        key = field.name
        stated = changed.get(key, config.get(key, ...))
        is_lost = stated is ... and "from_dict" not in vars(args) and key != "rope_scaling"
        is_null = stated is None and _is_never_null(field.type) and not _checks_for_none(args, key)
        if key in required and (is_lost or is_null):
            names = " or ".join(sorted({key} | sources.get(key, set())))
            raise ModelLoadError(
                f"config.json does not set {names}, which mlx-lm's module {module!r} needs: "
                "add it to config.json, or set it with --hf-overrides"
            )
    if "rope_scaling" in required and "rope_scaling" not in config:
        changed.setdefault("rope_scaling", None)
    if module in config_refusals.UNSCALED and "rope_scaling" in read:
        changed["rope_scaling"] = (
            None  # fix_ropes() applies it; some modules reject what they ignore
        )
    return changed, used


def _is_never_null(annotation: Any) -> bool:
    """Whether a field is a number or list that must not be null."""
    if isinstance(annotation, str):  # the module postpones annotations
        return annotation.split("[")[0] in ("int", "float", "list", "List")
    return annotation in (int, float, list) or get_origin(annotation) is list


def _checks_for_none(args: type, name: str) -> bool:
    """Whether the module compares a key with None, whatever its annotation says."""
    source = inspect.getsource(sys.modules[args.__module__])
    return re.search(rf"\.{name} is (not )?None\b", source) is not None


def _text_args(text: Config, module: str) -> tuple[str, type | None]:
    """Returns the module that reads a `text_config`, and its arguments class."""
    if f"{MLX_LM}{module}" not in sys.modules:
        return module, mlx_vlm_text.text_arguments(module)
    if module == "mistral3":
        inner = text.get("model_type")
        module = inner if inner in ("ministral3", "mistral4") else "llama"
    module = _TEXT_OF.get(module, module)
    own = sys.modules[f"{MLX_LM}{module}"]
    for cls in own.Model.__mro__:  # variants inherit their model from another module
        for name in _TEXT_ARGS:
            found = getattr(sys.modules[cls.__module__], name, None)
            if found is not None:
                is_mlx_lm = found.__module__.startswith("mlx_lm.")  # else it is from a patch
                owner = found.__module__ if is_mlx_lm else cls.__module__
                return owner.rpartition(".")[2], found
    text_changes: type | None = getattr(own, "ModelArgs", None)
    if text_changes is None or "text_config" in inspect.signature(text_changes).parameters:
        return module, None
    return module, text_changes
