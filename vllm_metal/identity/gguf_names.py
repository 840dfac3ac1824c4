# SPDX-License-Identifier: Apache-2.0
"""Resolves a user's model name to a GGUF file."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_metal.identity.model_files import ModelLoadError

#: A repository of the hub and a tag, as llama.cpp and Ollama write it: "owner/name:Q4_K_M".
_TAGGED = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+):(?P<tag>[\w.-]+)")
_PART = re.compile(r"-(\d{5})-of-\d{5}\.gguf$")
_MAGIC = b"GGUF"


def file_of(model: str) -> Path | None:
    """Returns the GGUF file that a name means; None if it means no GGUF model.

    Raises ModelLoadError if there is no such file, or several.
    """
    path = Path(model).expanduser()
    if path.is_file() and _is_gguf(path):
        return path
    if path.suffix == ".gguf":
        why = "is not a GGUF file: download it again" if path.is_file() else "does not exist"
        raise ModelLoadError(f"{path} {why}.")
    tagged = _TAGGED.fullmatch(model)
    if tagged is None or path.exists():
        return None
    return _find_tagged(tagged["repo"], tagged["tag"])


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _find_tagged(repo: str, tag: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    download = f"hf download {repo} --include '*{tag}*'"
    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ModelLoadError(
            f"{repo}:{tag} is not in the Hugging Face cache. Run `{download}` first."
        ) from error
    # mmproj files hold vision towers, not models.
    files = [path for path in sorted(folder.rglob("*.gguf")) if "mmproj" not in path.name.lower()]
    word = re.compile(rf"(?<![a-z0-9_]){re.escape(tag.lower())}(?![a-z0-9_])")
    found = [
        path
        for path in files
        if word.search(str(path.relative_to(folder)).lower())
        # Only the first part of a split model.
        and ((part := _PART.search(path.name)) is None or int(part[1]) == 1)
    ]
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(path.relative_to(folder)) for path in found or files) or "none"
    if found:
        raise ModelLoadError(f"{repo}:{tag} names several files: {names}. Give one file's path.")
    raise ModelLoadError(
        f"{repo}:{tag} is not in the Hugging Face cache, which has {names}. Run `{download}` first."
    )
