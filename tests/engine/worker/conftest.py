# SPDX-License-Identifier: Apache-2.0
"""Runners without a model hold no memory: a pass of the collector would take half a second each."""

import pytest

from vllm_metal.device import mlx_device


@pytest.fixture(autouse=True)
def given_back(monkeypatch):
    """Has a call for each time that memory would be given back."""
    calls = []
    monkeypatch.setattr(mlx_device, "give_back", lambda: calls.append("given back"))
    return calls
