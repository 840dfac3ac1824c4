# SPDX-License-Identifier: Apache-2.0
"""Finds MTP layers on disk: in a model's checkpoint, or split off into a folder next to it.

mlx-vlm writes such folders (`mlx_vlm.split_mtp`, `mlx_vlm.convert --mtp`). Gemma 4's assistants are
found in the same places. Nothing is downloaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vllm_metal.engine.models.mtp_families import MTP_FAMILIES, MTPFamily
from vllm_metal.engine.weights import files
from vllm_metal.identity import model_names
from vllm_metal.settings.architectures import ASSISTANTS, ASSISTED, SPLIT_MTP, mtp_depth

#: Names of subfolders of the model's.
_MTP, _ASSISTANT = "mtp", "assistant"
#: Added to the model's name, anywhere in it, it names a folder beside the model's.
_MARK = re.compile(rf"-(?:{_MTP}|{_ASSISTANT})(?=[-_.]|$)", re.IGNORECASE)
_REPOSITORY = "models--"  # prefix of folders in the Hugging Face cache


def published(folder: Path) -> dict[str, Any]:
    """Content of a folder's config.json; empty if missing or not a JSON object."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def folder_of(
    model: str, revision: str | None = None, cache_dir: Path | None = None
) -> Path | None:
    """The folder of a model: a local one, or its snapshot in the Hugging Face cache."""
    if (folder := model_names.folder_here(model)) is not None:
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir, revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def family_of(content: Mapping[str, Any]) -> MTPFamily | None:
    """The family of MTP layers that a model with this config.json may have."""
    kind = content.get("model_type")
    return next((each for each in MTP_FAMILIES.values() if kind in each.model_types), None)


def is_assistant(content: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to an assistant of Gemma 4."""
    return content.get("model_type") in ASSISTANTS


def is_assisted(content: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to a model that assistants are made for."""
    return content.get("model_type") in ASSISTED


def depth_of(content: Mapping[str, Any]) -> int:
    """The number of MTP layers that a config.json states; conversions may drop the layers alone."""
    return mtp_depth(content.get("mtp_config") or content.get("text_config") or content)


def num_drafting(content: Mapping[str, Any]) -> int:
    """How many of the MTP layers of a config.json draft a token each; see MTPFamily."""
    family = _of_layers(content)
    return 1 if family is None else family.num_drafting(depth_of(content), is_split(content))


def is_depth_supported(content: Mapping[str, Any]) -> bool:
    """Whether MTP layers may be as many as a config.json states."""
    family = _of_layers(content)
    return family is None or family.takes(depth_of(content))


def unknown_key(content: Mapping[str, Any]) -> str | None:
    """Returns a key of a config.json about MTP layers, with its value, that is not supported."""
    family = _of_layers(content)
    return None if family is None else family.unknown_key(content)


def default_drafts(content: Mapping[str, Any]) -> int | None:
    """Returns the default number of drafts of MTP layers that draft one token each, whatever their
    number; None: a single layer drafts all."""
    family = _of_layers(content)
    if family is None or family.default_drafts is None:
        return None
    return min(family.default_drafts, depth_of(content))


def _of_layers(content: Mapping[str, Any]) -> MTPFamily | None:
    if not is_split(content):
        return family_of(content)
    return MTP_FAMILIES.get(architecture_of(content) or "")


def is_split(content: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to MTP layers that mlx-vlm split from a checkpoint."""
    kind = str(content.get("model_type"))
    return kind.endswith("_mtp") and "text_config" in content


def architecture_of(content: Mapping[str, Any]) -> str | None:
    """vLLM's name for the architecture of split MTP layers; None if they are not supported."""
    text = content.get("text_config") or {}
    return SPLIT_MTP.get(str(content.get("model_type")), {}).get(str(text.get("model_type")))


def carries_layers(folder: Path) -> bool:
    """Whether a checkpoint contains MTP layers; conversions to MLX often drop them.

    Raises:
        ModelLoadError: a weight file is unreadable or truncated.
    """
    content = published(folder)
    family, text = family_of(content), content.get("text_config") or content
    count = text.get("num_hidden_layers")
    if family is None or (count is None and family.numbers_on):
        return False
    paths = sorted(folder.glob("*.safetensors"))
    named = partial(family.own_name, num_layers=count or 0)
    return bool(files.headers_of(paths, lambda name, _: named(name) is not None))


def split_beside(folder: Path) -> Path | None:
    """The first folder of `places` with a drafter for a model of this family, or None.

    A drafter is MTP layers split from a model, or an assistant.
    """
    of_model = published(folder)
    family = family_of(of_model)
    for place in _places(folder):
        content = published(place)
        if is_assistant(content) and is_assisted(of_model):
            return place
        architecture = architecture_of(content) if is_split(content) else None
        if architecture is not None and MTP_FAMILIES[architecture] is family:
            return place
    return None


def layers_of(folder: Path) -> Path | None:
    """The folder with a model's MTP layers or assistant: its own, or one next to it; or None.

    Raises:
        ModelLoadError: a weight file is unreadable or truncated.
    """
    if carries_layers(folder):
        return folder
    place = split_beside(folder)
    sizes = [_sizes(published(each)) for each in (folder, place) if each is not None]
    return place if len(set(sizes)) == 1 else None


def _sizes(content: Mapping[str, Any]) -> tuple[Any, Any]:
    text = content.get("text_config") or content
    width = content.get("backbone_hidden_size")  # of an assistant's target
    return width or text.get("hidden_size"), text.get("vocab_size")


def places(folder: Path) -> str:
    """Names the folders that `split_beside` searches, for error messages."""
    kind = _ASSISTANT if is_assisted(published(folder)) else _MTP
    repository = _repository(folder)
    if repository is None:
        beside, name = f"folders of {folder.resolve().parent}", folder.resolve().name
    else:
        beside, name = "models in the Hugging Face cache", _repository_name(repository)
    return f"{folder / kind}, or {beside} named {name} with -{kind} added, such as {name}-{kind}"


def _places(folder: Path) -> Iterator[Path]:
    yield from (path for path in _folders(folder) if path.name.lower() in (_MTP, _ASSISTANT))
    repository = _repository(folder)
    if repository is None:
        path = folder.resolve()
        yield from (found for found in _folders(path.parent) if _is_marked(found.name, path.name))
        return
    for other in _folders(repository.parent):
        if _is_marked(other.name, repository.name):
            found = folder_of(_repository_name(other), cache_dir=repository.parent)
            yield from () if found is None else (found,)


def _is_marked(name: str, model: str) -> bool:
    return _MARK.search(name) is not None and _MARK.sub("", name, 1).lower() == model.lower()


def _repository(folder: Path) -> Path | None:
    """The model's folder in the Hugging Face cache that a snapshot belongs to; None outside it."""
    repository = folder.parent.parent
    cached = folder.parent.name == "snapshots" and repository.name.startswith(_REPOSITORY)
    return repository if cached else None


def _repository_name(repository: Path) -> str:
    return repository.name.removeprefix(_REPOSITORY).replace("--", "/")


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:  # a folder that may be entered and not listed
        return []
