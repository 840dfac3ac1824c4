# SPDX-License-Identifier: Apache-2.0
"""The one judgment of a model's folder, of a server and of `vllm-metal fit`: whether it is served.

It reads config.json and the headers of weights alone. Which keys of config.json are computed tells
mlx-lm's module where it is loaded: in the engine's process, and by `fit`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_metal.engine.config_json import config_sizes
from vllm_metal.engine.models import architectures
from vllm_metal.engine.weights import files
from vllm_metal.engine.weights.judge import plan_of
from vllm_metal.engine.weights.quantization import Quantization
from vllm_metal.identity import model_files
from vllm_metal.identity.model_files import ModelLoadError


def check(folder: Path) -> dict[str, Any]:
    """Checks a folder before it is loaded, and returns what its config.json says.

    Raises:
        ModelLoadError: it is damaged, or its architecture or format is not served; the message
            says what is wrong.
    """
    config = check_config(folder)
    if model_files.is_gguf(folder):
        files.check_weight_files(folder)
    elif config.get("quantization"):  # MLX's own tools wrote it
        files.headers(folder)
    else:
        plan_of(config, files.headers(folder), folder)
    return config


def check_config(folder: Path) -> dict[str, Any]:
    """Checks a folder's config.json alone, and returns what it says.

    Raises:
        ModelLoadError: see `check`.
    """
    config = config_sizes.read(folder)
    try:
        architectures.check(config)
    except ModelLoadError:
        from vllm_metal.engine.pooling.encoders import served  # imports vLLM, which takes seconds

        if served.of_content(config) is None:
            served.refuse_others(config)
            raise
        return config
    Quantization.read(config, folder)
    return config
