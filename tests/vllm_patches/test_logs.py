# SPDX-License-Identifier: Apache-2.0
"""Only these warnings are dropped; test_needed.py shows that vLLM and torch still word them so."""

import logging

import pytest

from vllm_metal.vllm_patches.logs import UNHELPFUL, drop_unhelpful_warnings


@pytest.mark.parametrize(("name", "beginning"), UNHELPFUL.items())
def test_nothing_else_is_dropped(
    name: str, beginning: str, caplog: pytest.LogCaptureFixture
) -> None:
    drop_unhelpful_warnings()
    logger = logging.getLogger(name)
    logger.addHandler(caplog.handler)
    try:
        logger.warning("%s matters", "another")
        logger.warning(beginning + ", and so on")
        logger.error("it did not begin so: %s", beginning)
    finally:
        logger.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records]
    assert set(said) == {"another matters", f"it did not begin so: {beginning}"}
