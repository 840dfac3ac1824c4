# SPDX-License-Identifier: Apache-2.0
"""Where a chat runs unless it is told otherwise: device, logs, model, size of the KV cache."""

import os
from pathlib import Path

from vllm_metal.settings import envs

# Enough for one conversation; vLLM would otherwise take most of the machine's memory.
DEFAULT_KV_CACHE_GIB = 1.0


def prepare(offline: bool, quiet: bool = True) -> envs.Device | None:
    """Sets the environment up; call it before anything imports vLLM or MLX.

    On a machine without a Mac's GPU it chooses MLX's CPU backend, unless ``VLLM_METAL_DEVICE`` is
    set.

    Args:
        offline: whether to forbid access to the network.
        quiet: whether to limit logs to warnings, unless ``VLLM_LOGGING_LEVEL`` is set.

    Returns:
        The MLX device, or None where ``VLLM_METAL_DEVICE=off``.
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
    """Directory of the embedded model in the form that suits the device; call `prepare` first.

    Raises:
        ImportError: the package with the weights is not installed; the message has the command.
    """
    from vllm_metal.engine.models.embedded import embedded_model_path

    return embedded_model_path()
