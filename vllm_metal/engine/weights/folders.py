# SPDX-License-Identifier: Apache-2.0
"""Resolves a model's name to the folder to load; a GGUF file is represented by a small folder."""

from __future__ import annotations

from metal_kernels.cache import cache_dir
from vllm_metal.identity import gguf_names, model_names
from vllm_metal.settings import envs


def folder_of(model: str, tokenizer: bool = True) -> str:
    """Returns the folder that represents a GGUF model; returns other names unchanged.

    Args:
        model: a file, recognized by its first bytes; "owner/name:TAG" for a file in the Hugging
            Face cache; or anything else.
        tokenizer: whether to write the tokenizer in the file to the folder.

    Raises:
        ModelLoadError: no file or several match, or the file is not supported.
    """
    if (file := gguf_names.file_of(model)) is None:
        return model
    from vllm_metal.engine.weights import gguf_model  # needs the package gguf

    return str(gguf_model.folder_of(file, cache_dir() / "gguf", envs.gguf_inexact(), tokenizer))


def checked_folder_of(model: str, tokenizer: bool = True) -> str:
    """Like `folder_of`, but checks names that mean no GGUF model with `model_names.check`.

    Raises ModelLoadError: see `folder_of` and `model_names.check`.
    """
    folder = folder_of(model, tokenizer)
    if folder == model:
        model_names.check(model)
    return folder
