# SPDX-License-Identifier: Apache-2.0
"""Checks a model before a command imports or starts anything for it."""

from __future__ import annotations

from vllm_metal.device import blas
from vllm_metal.settings import envs


def check_model(model: str, computes: bool = False) -> None:
    """Checks a model (folder or hub name) and its tokenizer within a second.

    `computes`: whether this process will compute with MLX; the check then imports it. Raises
    ModelLoadError if the model cannot be served.
    """
    if computes and envs.requested_device() == "cpu":
        blas.load()  # before the imports below load MLX
    from vllm_metal.identity import model_files, model_names
    from vllm_metal.platform import model_folders

    model_names.check(model)
    if (folder := model_names.folder_here(model)) is not None:
        model_folders.check(folder)
        if not model_files.is_gguf(folder):
            model_names.check_tokenizer(model)


def check_template(model: str) -> None:
    """Checks that a model's folder has a chat template.

    Raises ModelLoadError if there is none, ValueError if it cannot be parsed.
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
    """Raises ValueError if a KV cache of `gib` GiB exceeds this machine's memory."""
    import psutil

    most = psutil.virtual_memory().total / 2**30
    if gib > most:
        raise ValueError(
            f"--kv-cache-gib={gib:g} is more than the memory of this machine, {most:.1f} GiB: give "
            "less, or leave it out"
        )


def check_hub() -> None:
    """Raises ModelLoadError, naming the local models, if the hub cannot be reached."""
    from vllm_metal.identity import model_files, model_names

    if why := model_names.unreachable():
        here = ", ".join(model_names.cached()) or "a folder"
        raise model_files.ModelLoadError(f"no MODEL is given, and {why}. Or name a MODEL: {here}")
