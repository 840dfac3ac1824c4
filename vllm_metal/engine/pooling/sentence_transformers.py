# SPDX-License-Identifier: Apache-2.0
"""Finds parts of a checkpoint's sentence-transformers files that vLLM's poolers would skip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

#: Modules that need no pooler; inference drops nothing out.
_OTHER_MODULES = ("Transformer", "Dropout")
#: Pooling modes that vLLM has, as keys or values of 1_Pooling/config.json.
_POOLING_MODES = ("cls_token", "mean_tokens", "lasttoken", "cls", "mean")
_MODE = "pooling_mode"


def left_out(model: ModelConfig) -> list[str]:
    """Lists parts of the files that vLLM's poolers skip; empty without such files.

    A pooling type chosen by the user overrides the file's.
    """
    from vllm.transformers_utils import config

    pooling = config._ST_POOLING_MODULE_TYPES  # full names: vLLM skips all others
    known = pooling | config._ST_NORMALIZE_MODULE_TYPES | config._DENSE_MODULE_TYPES
    modules = _read(model, "modules.json") or []
    types = [str(module.get("type", "")) for module in modules]
    kinds = [name.rsplit(".", 1)[-1] for name in types]
    found = [
        f"module {name}"
        for name, kind in zip(types, kinds, strict=True)
        if name not in known and kind not in _OTHER_MODULES
    ]
    found += [
        f"a Transformer in folder {module.get('path')}"
        for kind, module in zip(kinds, modules, strict=True)
        if kind == "Transformer" and module.get("path")
    ]
    by_user = getattr(model, "_pooler_config_sources", {}).get("seq_pooling_type") == "user"
    for name, module in zip(types, modules, strict=True):
        if name in pooling and not by_user:
            found += _unsupported_pooling(_read(model, f"{module['path']}/config.json") or {})
    return found


def _unsupported_pooling(content: dict[str, Any]) -> list[str]:
    modes = [
        key.removeprefix(f"{_MODE}_")
        for key, value in content.items()
        if key.startswith(f"{_MODE}_") and value is True
    ]
    modes += [str(content[_MODE])] if isinstance(content.get(_MODE), str) else []
    found = [f"pooling by {mode}" for mode in modes if mode not in _POOLING_MODES]
    if len(modes) > 1:
        found.append(f"pooling in several ways ({', '.join(modes)})")
    if content.get("include_prompt") is False and any("mean" in mode for mode in modes):
        found.append("a mean without the prompt's tokens (include_prompt)")
    return found


def _read(model: ModelConfig, name: str) -> Any:
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    return get_hf_file_to_dict(name, model.model, model.revision)
