# SPDX-License-Identifier: Apache-2.0
"""Checks whether a model's folder can be served, for servers and for `vllm-metal fit`.

It reads only config.json and the headers of weight files. Keys of config.json that the model would
ignore are found later, where mlx-lm's module is loaded: in the engine's process, and in `fit`.
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
    """Checks a folder before it is loaded, and returns its config.json.

    Raises ModelLoadError if it is damaged, or its architecture or format is not supported.
    """
    config = check_config(folder)
    if model_files.is_gguf(folder):
        files.check_weight_files(folder)
    elif config.get("quantization"):  # written by MLX's own tools
        files.headers(folder)
    else:
        plan_of(config, files.headers(folder), folder)
    return config


def check_config(folder: Path) -> dict[str, Any]:
    """Checks only a folder's config.json, and returns it; raises ModelLoadError as `check` does."""
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
