# SPDX-License-Identifier: Apache-2.0
"""Captures log records whether or not vLLM's loggers propagate them."""

import logging

import pytest


@pytest.fixture
def caplog_vllm(caplog, monkeypatch):
    """Captures records below `vllm_metal` at every level."""
    logger = logging.getLogger("vllm_metal")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.DEBUG, "vllm_metal")
    yield caplog
    logger.removeHandler(caplog.handler)
