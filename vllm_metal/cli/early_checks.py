# SPDX-License-Identifier: Apache-2.0
"""Checks a model that a command was given before anything is imported or started for it."""

from __future__ import annotations

from vllm_metal.device import blas
from vllm_metal.settings import envs


def check_model(model: str, computes: bool = False) -> None:
    """Checks a model's name, or its folder, within a second.

    Args:
        model: a folder, or a name on the hub.
        computes: whether this process will compute with MLX, which the check imports.

    Raises:
        ModelLoadError: it means no model that is served, or one without its tokenizer.
    """
    if computes and envs.requested_device() == "cpu":
        blas.load()
    from vllm_metal.identity import model_files, model_names
    from vllm_metal.platform import model_folders

    model_names.check(model)
    if (folder := model_names.folder_here(model)) is not None:
        model_folders.check(folder)
        if not model_files.is_gguf(folder):
            model_names.check_tokenizer(model)


def check_template(model: str) -> None:
    """Checks that a model's folder has a chat template.

    Raises:
        ModelLoadError: it has none.
        ValueError: it cannot be parsed.
    """
    from vllm_metal.engine.weights import folders
    from vllm_metal.identity import model_files, model_names
    from vllm_metal.serving.parsers import files as parsers_files

    if not model_names.folder_here(model):
        return
    folder = folders.folder_of(model)
    parsers_files.check_own_templates(folder)
    if not parsers_files.read(folder).templates:
        raise model_files.ModelLoadError(
            f"{model} has no chat template, so it cannot chat: choose an instruction-tuned "
            "MODEL, or pass a template with --serve --chat-template FILE"
        )


def check_pool(gib: float) -> None:
    """Checks the size of a KV cache, in the words of commands that take it in GiB.

    Raises:
        ValueError: this machine has less memory.
    """
    import psutil

    most = psutil.virtual_memory().total / 2**30
    if gib > most:
        raise ValueError(
            f"--kv-cache-gib={gib:g} is more than the memory of this machine, {most:.1f} GiB: give "
            "less, or leave it out"
        )


def check_hub() -> None:
    """Checks that a model can be fetched, where none is given.

    Raises:
        ModelLoadError: it cannot; the message names models of this machine.
    """
    from vllm_metal.identity import model_files, model_names

    if why := model_names.unreachable():
        here = ", ".join(model_names.cached()) or "a folder"
        raise model_files.ModelLoadError(f"no MODEL is given, and {why}, or give one: {here}")
