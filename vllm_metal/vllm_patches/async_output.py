# SPDX-License-Identifier: Apache-2.0
"""A base class for asynchronous outputs that every served vLLM release accepts; changes nothing."""

from __future__ import annotations

from vllm.v1.outputs import AsyncModelRunnerOutput, KVConnectorOutput

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32",)


class AsyncOutput(AsyncModelRunnerOutput):
    """A step's output that the device may still be computing; subclasses write `get_output`."""

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """What the scheduler is to hear of K/V transfers; the method is abstract since 0.33."""
        return None
