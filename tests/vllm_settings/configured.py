# SPDX-License-Identifier: Apache-2.0
"""Makes vLLM's engine configuration without loading a model."""

from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs


def configure(folder: str, **options: Any) -> VllmConfig:
    """Returns the configuration for a model folder, which needs neither weights nor a tokenizer."""
    options = {"skip_tokenizer_init": True, "max_model_len": 256} | options
    return EngineArgs(model=folder, **options).create_engine_config()
