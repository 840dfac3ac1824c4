# SPDX-License-Identifier: Apache-2.0
"""How long an engine's process may take to end, as a server asks vLLM's manager of it."""

import pytest
from vllm.v1.engine import utils

from vllm_metal.vllm_patches import shutdown


@pytest.mark.parametrize(
    ("system", "asked", "given"),
    [("linux", 0, 15.0), ("darwin", 0, 60.0), ("darwin", 90.0, 90.0), ("darwin", None, 60.0)],
)
def test_an_engine_gets_time_to_end_and_on_a_mac_more(system, asked, given, monkeypatch):
    """Where --shutdown-timeout is not set; a Mac may lose what a killed process had wired."""
    timeouts = []

    class Manager:
        _request_shutdown_timeout = 0

        def shutdown(self, timeout=None):
            timeouts.append(timeout)

    monkeypatch.setattr(utils, "CoreEngineProcManager", Manager)
    monkeypatch.setattr("sys.platform", system)
    shutdown.let_engines_end()
    Manager().shutdown(timeout=asked)
    assert timeouts == [given]
