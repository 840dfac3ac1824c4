# SPDX-License-Identifier: Apache-2.0
"""Engines in this process, so that their memory and their counters can be read."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import pytest

from vllm_metal.models.embedded import embedded_model_path, gemma3_270m_path


@pytest.fixture(scope="session")
def smollm2() -> str:
    """SmolLM2-135M-Instruct in float32, from its package."""
    return str(embedded_model_path(dequantize=True))


@pytest.fixture(scope="session")
def gemma3() -> str:
    """Gemma 3 270M in float32, from its package: five window layers to one full."""
    return str(gemma3_270m_path())
