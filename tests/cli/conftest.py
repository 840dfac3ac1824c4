# SPDX-License-Identifier: Apache-2.0
"""Undoes the `vllm-metal` command's changes to the process that it expects to own."""

import logging
import os
import signal

import pytest
import vllm.logger  # noqa: F401  # its handler keeps the stdout of this moment, not a test's


@pytest.fixture(autouse=True)
def restored_process(monkeypatch):
    """Restores signal handlers, vLLM's log and the variable that `cli.main` sets by default."""
    logger = logging.getLogger("vllm")
    of_logs = logger.handlers[:]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    if (name := "VLLM_LOGGING_LEVEL") not in os.environ:
        monkeypatch.setenv(name, "")  # so that its absence is restored
        monkeypatch.delenv(name)
    yield
    logger.handlers[:] = of_logs  # an engine's start replaces them by handlers for a test's stdout
    for number, handler in handlers.items():
        signal.signal(number, handler)
