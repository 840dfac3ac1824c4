# SPDX-License-Identifier: Apache-2.0
"""Undoes what the `vllm-metal` command sets for the process that it expects to own."""

import os
import signal

import pytest
import vllm.logger  # noqa: F401  # its handler keeps the stdout of this moment, not a test's


@pytest.fixture(autouse=True)
def restored_process(monkeypatch):
    """Restores signal handlers and the variable that `cli.main` sets by default."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    if (name := "VLLM_LOGGING_LEVEL") not in os.environ:
        monkeypatch.setenv(name, "")  # so that its absence is restored
        monkeypatch.delenv(name)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
