# SPDX-License-Identifier: Apache-2.0
"""Only the one warning is dropped; that vLLM still words it so is shown in tests/darwin."""

import logging

import pytest

from vllm_metal.vllm_patches.logs import drop_compiler_warning


def test_nothing_else_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    drop_compiler_warning()
    logger = logging.getLogger("vllm.config.vllm")
    logger.addHandler(caplog.handler)
    try:
        logger.warning("Inductor compilation was disabled by user settings, optimizations ...")
        logger.warning("Something else: %s", "that matters")
        logging.getLogger("vllm.config.model").warning("Inductor compilation was disabled by ...")
    finally:
        logger.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records]
    assert "Something else: that matters" in said
    assert not any(text.startswith("Inductor") and "optimizations" in text for text in said)
