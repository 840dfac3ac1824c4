# SPDX-License-Identifier: Apache-2.0
"""Resolves a model's name to the folder to load: a GGUF file gets one that stands for it."""

from __future__ import annotations

from metal_kernels.cache import cache_dir
from vllm_metal.identity import gguf_names, model_names
from vllm_metal.settings import envs


def folder_of(model: str, tokenizer: bool = True) -> str:
    """The folder that stands for a GGUF model; any other model as it is named.

    Args:
        model: a file, known by its first bytes; "owner/name:TAG" for a file in the Hugging Face
            cache; or anything else.
        tokenizer: whether the file's own tokenizer is used.

    Raises:
        ModelLoadError: there is no such file, or several; or it is not supported.
    """
    if (file := gguf_names.file_of(model)) is None:
        return model
    from vllm_metal.engine.weights import gguf_model  # needs the package gguf

    return str(gguf_model.folder_of(file, cache_dir() / "gguf", envs.gguf_inexact(), tokenizer))


def checked_folder_of(model: str, tokenizer: bool = True) -> str:
    """Like `folder_of`; a name that is no GGUF model's is checked.

    Raises:
        ModelLoadError: also where `model_names.check` raises it.
    """
    folder = folder_of(model, tokenizer)
    if folder == model:
        model_names.check(model)
    return folder
