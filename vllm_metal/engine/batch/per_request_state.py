# SPDX-License-Identifier: Apache-2.0
"""RequestColumn: what requests bring for one part of a step, kept by req_idx; who is refused."""

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
    """Requests that a runner could not take in; all others it has."""

    def __init__(self, errors: dict[str, Exception]) -> None:
        """
        Args:
            errors: by request id.
        """
        super().__init__(", ".join(errors))
        self.errors = errors


class PerRequestState(Protocol):
    """Keeps by req_idx what requests ask of one part of a step.

    The runner has a list of them, and tells each of every request that enters or leaves its row. A
    column reads what it wants of `RequestState.request`, which is all that the scheduler sent.
    """

    def step_begins(self, scheduler_output: SchedulerOutput) -> None:
        """The scheduler's word of a step has come; requests are as the step before left them."""
        return

    def enter(self, state: RequestState) -> None:
        """A request starts, resumes, or begins another turn. It fails alone where this raises."""
        ...

    def leave(self, req_idx: int) -> None:
        """Empties a row, of which the column may know nothing; another request may take it."""
        ...

    def extras(self, rows: Rows) -> Mapping[str, mx.array]:
        """Arrays of [T, ...] that the forward of these rows gets by name (ForwardInputs.extras)."""
        return {}

    def inputs(self, rows: Rows, inputs: ForwardInputs) -> ForwardInputs:
        """What the forward of these rows reads: `inputs`, and what the column has of the rows.

        Raises:
            RequestsRefused: some of the requests cannot be computed; they fail alone.
        """
        return inputs.with_extras(self.extras(rows))
