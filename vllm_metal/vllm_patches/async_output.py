# SPDX-License-Identifier: Apache-2.0
"""vLLM's class of outputs on their way, whole on every release; nothing is changed."""

from __future__ import annotations

from vllm.v1.outputs import AsyncModelRunnerOutput

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")


class AsyncOutput(AsyncModelRunnerOutput):
    """A step's output on its way to the scheduler; `get_output` is left to be written."""

    def get_kv_connector_output(self) -> None:
        """What K/V connectors have to say, which are refused; abstract since 0.33."""
        return None
