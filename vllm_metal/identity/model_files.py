# SPDX-License-Identifier: Apache-2.0
"""Finds a model's folder, and its weight files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

INDEX = "model.safetensors.index.json"
#: In a folder that stands for a GGUF model: the list of its files, and how to read them.
GGUF_FILES, GGUF_CONVERSION = "gguf.json", "gguf_conversion.json"
AGAIN = "download it again, or convert the model again"
#: Weight files of a model without an index: the first pattern with a match counts.
PATTERNS = ("model*.safetensors", "pytorch_model*.safetensors", "weights*.safetensors")
#: Files to download; vLLM downloads the tokenizer itself.
_OF_MODEL = ("*.json", *PATTERNS, "*.py", "*.tiktoken", "*.jinja")
#: Files to download for a draft head that uses the target's hidden states.
HEAD_PATTERNS = ("*.json", "*.safetensors", "*.bin", "*.pt")


class ModelLoadError(RuntimeError):
    """The model folder cannot be loaded; the message says why and what to do."""


def unreadable(path: Path, error: OSError) -> ModelLoadError:
    """Makes the error for a file that exists but cannot be read."""
    remedy = "check its owner and its mode"
    if path.is_symlink() and not isinstance(error, PermissionError):
        remedy = f"it is a broken link; {AGAIN}"
    return ModelLoadError(f"{path} cannot be read ({error.strerror}): {remedy}")


def is_gguf(folder: Path) -> bool:
    """Whether a folder stands for a GGUF model."""
    return (folder / GGUF_FILES).is_file()


def weight_files(folder: Path) -> list[Path]:
    """Lists a model's weight files: those in its index, or all of one naming pattern.

    Raises ModelLoadError if the index is unreadable.
    """
    if is_gguf(folder):
        return [Path(path) for path in json.loads((folder / GGUF_FILES).read_bytes())]
    index = folder / INDEX
    if index.is_file():
        return sorted({folder / name for name in weight_map(index).values()})
    return next(
        (found for pattern in PATTERNS if (found := sorted(folder.glob(pattern)))),
        [],
    )


def weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except OSError as error:
        raise unreadable(index, error) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelLoadError(f"{index} is unreadable ({first_line(error)}); {AGAIN}") from error


def first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def model_folder(
    model_config: ModelConfig, config: VllmConfig, patterns: tuple[str, ...] = _OF_MODEL
) -> Path:
    """Returns a checkpoint's folder, downloading it if necessary.

    Raises ModelLoadError if there is neither such a folder nor such a model on the hub.
    """
    model = model_config.model
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model,
                revision=model_config.revision,
                cache_dir=config.load_config.download_dir,
                allow_patterns=list(patterns),
            )
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ModelLoadError(
            f"there is no folder {model!r}, and Hugging Face has no such model: {error}"
        ) from error
