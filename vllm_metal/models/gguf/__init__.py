# SPDX-License-Identifier: Apache-2.0
"""Conversion of GGUF files into model directories that mlx-lm and vLLM load."""

from importlib.util import find_spec

if find_spec("gguf") is None:
    raise ImportError("GGUF files need the gguf package; run: pip install 'vllm-metal[gguf]'")

from .convert import CONVERTER_VERSION, ConvertOptions, convert
from .errors import ConversionError

__all__ = ["CONVERTER_VERSION", "ConversionError", "ConvertOptions", "convert"]
