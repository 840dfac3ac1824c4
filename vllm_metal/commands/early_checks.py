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
        ModelLoadError: it means no model that is served.
    """
    if computes and envs.requested_device() == "cpu":
        blas.load()
    from vllm_metal.platform import model_folders
    from vllm_metal.weights import model_names

    model_names.check(model)
    if (folder := model_names.folder_here(model)) is not None:
        model_folders.check(folder)
