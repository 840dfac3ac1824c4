# SPDX-License-Identifier: Apache-2.0
"""Finds in a checkpoint's sentence-transformers files what vLLM's poolers would leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

#: Modules beside those that vLLM's poolers are made of; a trained model drops nothing out.
_BESIDE = ("Transformer", "Dropout")
#: Ways of pooling that vLLM has, as 1_Pooling/config.json names them: by key, or by value.
_WAYS = ("cls_token", "mean_tokens", "lasttoken", "cls", "mean")
_MODE = "pooling_mode"


def left_out(model: ModelConfig) -> list[str]:
    """What the files ask for and vLLM's poolers do not do; empty where there are no such files.

    Args:
        model: vLLM's, which has read the files. A way of pooling that its user names counts.
    """
    from vllm.transformers_utils import config

    pooling = config._ST_POOLING_MODULE_TYPES  # by full names: vLLM passes over all others
    known = pooling | config._ST_NORMALIZE_MODULE_TYPES | config._DENSE_MODULE_TYPES
    modules = _read(model, "modules.json") or []
    types = [str(module.get("type", "")) for module in modules]
    kinds = [name.rsplit(".", 1)[-1] for name in types]
    found = [
        f"module {name}"
        for name, kind in zip(types, kinds, strict=True)
        if name not in known and kind not in _BESIDE
    ]
    found += [
        f"a Transformer in folder {module.get('path')}"
        for kind, module in zip(kinds, modules, strict=True)
        if kind == "Transformer" and module.get("path")
    ]
    by_user = getattr(model, "_pooler_config_sources", {}).get("seq_pooling_type") == "user"
    for name, module in zip(types, modules, strict=True):
        if name in pooling and not by_user:
            found += _of_pooling(_read(model, f"{module['path']}/config.json") or {})
    return found


def _of_pooling(content: dict[str, Any]) -> list[str]:
    ways = [
        key.removeprefix(f"{_MODE}_")
        for key, value in content.items()
        if key.startswith(f"{_MODE}_") and value is True
    ]
    ways += [str(content[_MODE])] if isinstance(content.get(_MODE), str) else []
    found = [f"pooling by {way}" for way in ways if way not in _WAYS]
    if len(ways) > 1:
        found.append(f"pooling in several ways ({', '.join(ways)})")
    if content.get("include_prompt") is False and any("mean" in way for way in ways):
        found.append("a mean without the prompt's tokens (include_prompt)")
    return found


def _read(model: ModelConfig, name: str) -> Any:
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    return get_hf_file_to_dict(name, model.model, model.revision)
