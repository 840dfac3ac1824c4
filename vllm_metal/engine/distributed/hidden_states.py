# SPDX-License-Identifier: Apache-2.0
"""Receives a step's hidden states from the previous pipeline stage and sends them to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import mlx.core as mx
import numpy as np
import torch

from vllm_metal.engine.batch.output_head import OutputHead
from vllm_metal.engine.batch.outputs import StepOutput
from vllm_metal.engine.batch.per_request_state import PerRequestState
from vllm_metal.engine.models.stage import HIDDEN

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.core.sched.output import GrammarOutput

    from vllm_metal.engine.attention.forward_inputs import ForwardInputs
    from vllm_metal.engine.batch.input_batch import InputBatch
    from vllm_metal.engine.batch.requests import Requests, RequestState
    from vllm_metal.engine.batch.rows import Rows
    from vllm_metal.patches.vllm_patches.step_result import StepResult


class Link(Protocol):
    """Carries hidden states from one stage to the next."""

    def send(self, hidden_states: mx.array) -> None:
        """Sends a step's hidden states, [T, ...]; waits only until they are computed."""
        ...

    def receive(self) -> mx.array:
        """Waits for the next step's hidden states, [T, ...], from the previous stage."""
        ...


@dataclass
class GroupLink:
    """Sends hidden states over vLLM's pipeline group (gloo)."""

    group: GroupCoordinator
    _num_sent: int = 0
    _num_received: int = 0

    def send(self, hidden_states: mx.array) -> None:
        self.group.isend_tensor_dict({"rows": to_torch(hidden_states), "step": self._num_sent})
        self._num_sent += 1

    def receive(self) -> mx.array:
        """Waits for the next step's hidden states, [T, ...], from the previous stage.
        Raises RuntimeError: the hidden states belong to another step, because a rank skipped one.
        """
        found: dict[str, Any] | None = self.group.recv_tensor_dict()
        assert found is not None
        if found["step"] != self._num_received:
            raise RuntimeError(
                f"the previous pipeline stage sent step {found['step']}, expected "
                f"{self._num_received}"
            )
        self._num_received += 1
        return to_mlx(found["rows"])


def to_torch(array: mx.array) -> torch.Tensor:
    # numpy, which converts between the two, has no bfloat16.
    if array.dtype == mx.bfloat16:
        bits = np.array(array.view(mx.uint16))
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def to_mlx(tensor: torch.Tensor) -> mx.array:
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.int16).numpy().view(np.uint16)).view(mx.bfloat16)
    return mx.array(tensor.numpy())


class HiddenIn(PerRequestState):
    """Makes a step's forward start from the previous stage's hidden states."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def enter(self, state: RequestState) -> None:
        return

    def leave(self, req_idx: int) -> None:
        return

    def inputs(self, rows: Rows, inputs: ForwardInputs) -> ForwardInputs:
        """Adds the previous stage's hidden states.

        Raises RuntimeError: their number of tokens differs from this rank's.
        """
        hidden, count = self._link.receive(), len(rows.positions_np)
        if len(hidden) != count:
            raise RuntimeError(
                f"the previous pipeline stage sent {len(hidden)} tokens, expected {count}"
            )
        return inputs.with_extras({HIDDEN: hidden})


class HiddenOut(OutputHead):
    """Output head of ranks before the last stage: sends hidden states to the next stage."""

    at_once: ClassVar[bool] = True

    def __init__(self, link: Link, requests: Requests) -> None:
        self._link = link
        self._requests = requests
        self._begun: tuple[InputBatch, mx.array] | None = None

    def enter(self, state: RequestState) -> None:
        return

    def leave(self, req_idx: int) -> None:
        return

    def begin(self, batch: InputBatch, hidden_states: mx.array) -> None:
        self._begun = batch, hidden_states[:, 0]

    def finish(self, grammar_output: GrammarOutput | None) -> tuple[StepOutput, list[mx.array]]:
        assert self._begun is not None
        (batch, hidden), self._begun = self._begun, None
        return _Sending(batch, hidden, self._link, self._requests), [hidden]


class _Sending(StepOutput):
    """A step without tokens; getting its results sends the hidden states to the next stage."""

    always_waits = True

    def __init__(
        self, batch: InputBatch, hidden_states: mx.array, link: Link, requests: Requests
    ) -> None:
        super().__init__(batch, None, {}, requests)
        self._hidden: mx.array | None = hidden_states
        self._link = link

    def get_output(self) -> StepResult:
        if self._hidden is not None:
            # Wait for the device here, so that gloo gets finished data; send once per step.
            mx.eval(self._hidden)
            self._link.send(self._hidden)
            self._hidden = None
        return super().get_output()
