# SPDX-License-Identifier: Apache-2.0
"""The state of a step between scheduler and device, and its late result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_metal.patches.vllm_patches.step_result import Metrics, StepResult

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput


@dataclass(eq=False)
class Step:
    """A step as the scheduler sent it, and its progress."""

    scheduler_output: SchedulerOutput
    pool: int  # number of the pool it is computed on
    num_by_graph: int = 0  # total of compiled forwards when it was submitted
    hooks_told: bool = False  # hooks were notified of its start
    requests_told: bool = False  # requests and per-request states are updated
    ended: bool = False  # hooks were notified of its end
    transfers: KVConnectorOutput | None = None  # K/V transfers to report to the scheduler
    metrics: Metrics = field(default_factory=dict)  # metrics of transfers

    @property
    def req_ids(self) -> list[str]:
        """Requests with scheduled tokens in this step."""
        return list(self.scheduler_output.num_scheduled_tokens)


class LateOutput(AsyncModelRunnerOutput):
    """A step's results, computed when vLLM asks for them."""

    def __init__(
        self, result: Callable[[], StepResult], transfers: KVConnectorOutput | None = None
    ) -> None:
        """Takes a function that computes the results, and the transfers to report if it raises."""
        self._result = result
        self._transfers = transfers

    def get_output(self) -> StepResult:
        return self._result()

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        return self._transfers
