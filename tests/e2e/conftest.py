# SPDX-License-Identifier: Apache-2.0
"""In-process engines, so that tests can read their memory and counters."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np
import pytest
from e2e.fuzz.models import VOCAB, write_models
from e2e.models import first_two_layers
from e2e.tenants import MAX_MODEL_LEN

from vllm_metal.engine.models.embedded import embedded_model_path, gemma3_270m_path


@pytest.fixture(scope="session")
def smollm2() -> str:
    """SmolLM2-135M-Instruct in float32, from its package."""
    return str(embedded_model_path(dequantize=True))


@pytest.fixture(scope="session")
def gemma3() -> str:
    """Gemma 3 270M in float32, from its package: five window layers per full-attention layer."""
    return str(gemma3_270m_path())


@pytest.fixture(scope="session")
def short(smollm2, tmp_path_factory) -> str:
    """SmolLM2's first two layers."""
    return first_two_layers(smollm2, tmp_path_factory.mktemp("short"))


@pytest.fixture(scope="session")
def long_texts(smollm2, tmp_path_factory) -> str:
    """The same for texts that take longer than a time limit."""
    changes = {"max_position_embeddings": MAX_MODEL_LEN}
    return first_two_layers(smollm2, tmp_path_factory.mktemp("long-texts"), **changes)


@pytest.fixture(scope="session")
def windowed(gemma3, tmp_path_factory) -> str:
    """Two layers of Gemma 3: one with a window of 64, one without."""
    kinds = ["sliding_attention", "full_attention"]
    changes = {"sliding_window": 64, "sliding_window_pattern": 2, "layer_types": kinds}
    return first_two_layers(gemma3, tmp_path_factory.mktemp("windowed"), **changes)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """Yields a folder of models with random weights, see `e2e.fuzz.models`."""
    folder = tmp_path_factory.mktemp("tiny-models")
    write_models(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_models) -> str:
    """A Llama with two small layers, for tests that do not depend on the text."""
    return str(tiny_models / "full")


@pytest.fixture(scope="session")
def tiny_text() -> list[int]:
    """400 tokens for `tiny`, none of them special."""
    return np.random.default_rng(2).integers(2, VOCAB, 400).tolist()


@pytest.fixture(scope="session")
def toys(tmp_path_factory):
    """Makes models with networks that draft, see `e2e.drafting`."""
    from e2e.drafting import write_toys

    return write_toys(tmp_path_factory.mktemp("toys"))
