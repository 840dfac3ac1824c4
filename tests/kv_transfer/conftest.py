# SPDX-License-Identifier: Apache-2.0
"""Shared by tests of stores, jobs and settings."""

import pytest
from kv_transfer.small_pool import store_on
from vllm.engine.arg_utils import EngineArgs


@pytest.fixture(scope="module")
def made():
    """Returns an engine's configuration without transfers, to be copied, not changed."""
    from vllm_metal.engine.models.embedded import embedded_model_path

    model = str(embedded_model_path(dequantize=True))
    return EngineArgs(model=model, max_model_len=64).create_engine_config()


@pytest.fixture
def store(tmp_path):
    made = store_on(tmp_path / "cache")
    yield made
    made.close()
