# SPDX-License-Identifier: Apache-2.0
"""Has the scheduler send each request's cache_salt to the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_metal.vllm_patches.replacing import replace

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.output import SchedulerOutput

#: The vLLM releases that all of this is true for.
RELEASES = ("0.32",)


def send_salts() -> None:
    """Has schedulers send each request's cache_salt along; call it in the process that schedules.

    vLLM's scheduler keeps the salt for the hashes of blocks and sends none to the worker, which
    keeps apart by it what requests draft from.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    replace(Scheduler, "schedule", _with_salts)


def _with_salts(schedule: Callable[..., SchedulerOutput]) -> Callable[..., SchedulerOutput]:
    def schedule_step(self: Any, *arguments: Any, **options: Any) -> SchedulerOutput:
        output = schedule(self, *arguments, **options)
        for data in output.scheduled_new_reqs:
            vars(data)["cache_salt"] = self.requests[data.req_id].cache_salt  # pickled with fields
        return output

    return schedule_step
