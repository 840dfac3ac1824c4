# SPDX-License-Identifier: Apache-2.0
"""Sets a chat's defaults: device, logs, model, size of the KV cache."""

import os
from pathlib import Path

from vllm_metal.settings import envs

# Enough for one conversation; by default vLLM would take most of the machine's memory.
DEFAULT_KV_CACHE_GIB = 1.0


def prepare(offline: bool, quiet: bool = True) -> envs.Device | None:
    """Sets up the environment; call it before anything imports vLLM or MLX.

    Without a Mac's GPU, selects MLX's CPU backend unless ``VLLM_METAL_DEVICE`` is set. `offline`
    forbids network access; `quiet` limits logs to warnings unless ``VLLM_LOGGING_LEVEL`` is set.
    Returns the MLX device, or None for ``VLLM_METAL_DEVICE=off``.
    """
    if quiet:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if offline:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if envs.requested_device() is None:
        os.environ.setdefault("VLLM_METAL_DEVICE", "cpu")
    return envs.requested_device()


def default_model() -> Path:
    """Returns the folder of the embedded model, converted for the device; call `prepare` first.

    Raises ImportError, with the command to run, if the package with its weights is missing.
    """
    from vllm_metal.engine.models.embedded import embedded_model_path

    return embedded_model_path()
