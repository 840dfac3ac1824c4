# SPDX-License-Identifier: Apache-2.0
"""What a step adds to an engine's figures, and how that travels from the worker to the server."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorStats
from vllm.v1.outputs import ECConnectorOutput

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import SchedulerStats

_KEY = "vllm_metal"


@dataclass(frozen=True)
class StepFigures:
    """Of one step that was handed to the device, and of the engine after it."""

    host_seconds: float  # of the worker's calls
    device_seconds: float | None  # at most; None: no token told when the step was over
    device_memory_bytes: int  # that MLX holds: live arrays, and buffers to use again
    memory_budget_bytes: int | None  # that MLX is held to; None: nobody set a limit
    failed_steps: int  # since the engine started
    prefill_seconds: float = 0.0  # of device_seconds, what rows of prompts took

    def for_scheduler(self) -> ECConnectorOutput:
        """As the part of a step's result that vLLM's scheduler passes on to stat loggers.

        vLLM has it for connectors that move encoders' outputs. The models served here have no
        encoder, so it is free.
        """
        return ECConnectorOutput(ec_connector_stats=ECConnectorStats({_KEY: asdict(self)}))

    @staticmethod
    def take_from(stats: SchedulerStats) -> StepFigures | None:
        """Takes a step's figures out of what the scheduler passed on; None: there are none.

        Who takes them must come before vLLM's own loggers: these look for a connector's class.
        """
        found = (stats.ec_connector_stats or {}).get(_KEY)
        if found is None:
            return None
        stats.ec_connector_stats = None
        return StepFigures(**found)
