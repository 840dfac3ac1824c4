# SPDX-License-Identifier: Apache-2.0
"""What vLLM's scheduler is told of a step: its tokens, or that there are none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.v1.outputs import AsyncModelRunnerOutput

from vllm_metal.patches.vllm_patches.step_result import Figures, StepResult

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput


@dataclass(eq=False)
class Step:
    """A step as the scheduler sent it, and how far it has got."""

    scheduler_output: SchedulerOutput
    pool: int  # the pool it is computed on, counted from the first
    num_by_graph: int = 0  # forwards that graphs had built when it was handed over, ever
    hooks_told: bool = False  # hooks have heard that it begins
    requests_told: bool = False  # requests and columns have its news
    ended: bool = False  # hooks have heard that it ended
    transfers: KVConnectorOutput | None = None  # what the scheduler is to hear of them
    figures: Figures = field(default_factory=dict)  # of transfers

    @property
    def req_ids(self) -> list[str]:
        """Requests that have rows in it."""
        return list(self.scheduler_output.num_scheduled_tokens)


class LateOutput(AsyncModelRunnerOutput):
    """A step's results, which are found out when vLLM asks for them."""

    def __init__(
        self, result: Callable[[], StepResult], transfers: KVConnectorOutput | None = None
    ) -> None:
        """
        Args:
            result: finds the results out.
            transfers: what the scheduler hears of them where `result` raises.
        """
        self._result = result
        self._transfers = transfers

    def get_output(self) -> StepResult:
        return self._result()

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        return self._transfers
