# SPDX-License-Identifier: Apache-2.0
"""PerRequestState: one component's state for each request, by req_idx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import mlx.core as mx
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_metal.engine.attention.forward_inputs import ForwardInputs
    from vllm_metal.engine.batch.requests import RequestState
    from vllm_metal.engine.batch.rows import Rows


class RequestsRefused(Exception):
    """Raised after all other requests were added; maps the id of each rejected one to its error."""

    def __init__(self, errors: dict[str, Exception]) -> None:
        super().__init__(", ".join(errors))
        self.errors = errors


class PerRequestState(Protocol):
    """Per-request state, by req_idx, of one component of a step, such as LoRA or images.

    The runner notifies it of every request that gets or gives up a req_idx. `RequestState.request`
    holds everything that the scheduler sent.
    """

    def step_begins(self, scheduler_output: SchedulerOutput) -> None:
        """Called when a step arrives from the scheduler, before requests are updated."""
        return

    def enter(self, state: RequestState) -> None:
        """Called when a request starts, resumes or begins a turn. Errors fail only that request."""
        ...

    def leave(self, req_idx: int) -> None:
        """Clears a req_idx, which another request may then use; no-op if nothing is stored."""
        ...

    def extras(self, rows: Rows) -> Mapping[str, mx.array]:
        """Returns [T, ...] arrays for the forward by name (ForwardInputs.extras)."""
        return {}

    def inputs(self, rows: Rows, inputs: ForwardInputs) -> ForwardInputs:
        """Adds the component's data to `inputs`; raises RequestsRefused to fail some requests."""
        return inputs.with_extras(self.extras(rows))
