# SPDX-License-Identifier: Apache-2.0
"""vLLM's configuration of an engine, made as for any: no model is loaded for it."""

from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs


def configure(folder: str, **options: Any) -> VllmConfig:
    """The configuration of the model in a folder, which needs neither weights nor a tokenizer."""
    options = {"skip_tokenizer_init": True, "max_model_len": 256} | options
    return EngineArgs(model=folder, **options).create_engine_config()
