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
        tokenizer: whether the file's own tokenizer is used.

    Raises:
        ModelLoadError: there is no such file, or several; or it is not supported.
    """
    if (file := gguf_names.file_of(model)) is None:
        return model
    from vllm_metal.engine.weights import gguf_model  # needs the package gguf

    return str(gguf_model.folder_of(file, cache_dir() / "gguf", envs.gguf_inexact(), tokenizer))


def checked_folder_of(model: str, tokenizer: bool = True) -> str:
    """Like `folder_of`, but checks names of other models with `model_names.check`.

    Raises:
        ModelLoadError: as `folder_of` or `model_names.check` raise it.
    """
    folder = folder_of(model, tokenizer)
    if folder == model:
        model_names.check(model)
    return folder
