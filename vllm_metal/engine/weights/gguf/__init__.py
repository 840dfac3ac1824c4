# SPDX-License-Identifier: Apache-2.0
"""Converts GGUF files to model directories that mlx-lm and vLLM load."""

from importlib.util import find_spec

from vllm_metal.settings.extras import install_advice

if find_spec("gguf") is None:
    raise ImportError(f"GGUF files need the gguf package; run: {install_advice('gguf')}")

from .convert import ConvertOptions, convert
from .source import ConversionError

__all__ = ["ConversionError", "ConvertOptions", "convert"]
