# SPDX-License-Identifier: Apache-2.0
"""vLLM's class of outputs on their way, whole on every release; nothing is changed."""

from __future__ import annotations

from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32", "0.33")


class AsyncOutput(AsyncModelRunnerOutput):
    """A step's output on its way to the scheduler; `get_output` is left to be written."""

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """What the scheduler is to hear of K/V transfers; abstract since 0.33."""
        return None
