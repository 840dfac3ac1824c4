# SPDX-License-Identifier: Apache-2.0
"""What is logged, whether or not vLLM's loggers pass it on to pytest's."""

import logging

import pytest


@pytest.fixture
def caplog_vllm(caplog, monkeypatch):
    """What is logged below `vllm_metal`, at every level."""
    logger = logging.getLogger("vllm_metal")
    monkeypatch.setattr(logger, "propagate", False)
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.DEBUG, "vllm_metal")
    yield caplog
    logger.removeHandler(caplog.handler)
