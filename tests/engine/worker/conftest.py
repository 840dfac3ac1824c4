# SPDX-License-Identifier: Apache-2.0
"""Disables garbage collection for runners without a model: half a second per pass."""

import pytest

from vllm_metal.device import mlx_device


@pytest.fixture(autouse=True)
def given_back(monkeypatch):
    """Counts the calls that return memory."""
    calls = []
    monkeypatch.setattr(mlx_device, "give_back", lambda: calls.append("given back"))
    return calls
