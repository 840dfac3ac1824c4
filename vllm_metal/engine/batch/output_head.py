# SPDX-License-Identifier: Apache-2.0
"""OutputHead: turns hidden states into results (tokens or embeddings)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from vllm_metal.engine.batch.per_request_state import PerRequestState

if TYPE_CHECKING:
    import mlx.core as mx
    from vllm.v1.core.sched.output import GrammarOutput

    from vllm_metal.engine.batch.input_batch import InputBatch
    from vllm_metal.engine.batch.outputs import StepOutput


class OutputHead(PerRequestState, Protocol):
    """Turns a step's hidden states into tokens or embeddings, with each request's parameters."""

    #: Whether `finish` needs nothing more of the scheduler, such as a grammar mask. vLLM then gets
    #: a step's results from `execute_model`, and never calls `sample_tokens`.
    at_once: ClassVar[bool] = False

    @property
    def needs_host_tokens(self) -> bool:
        """Whether `finish` needs earlier steps' sampled tokens on the host."""
        return False

    def begin(self, batch: InputBatch, hidden_states: mx.array) -> None:
        """Receives the lazy [T, 1, H] hidden states of the forward that was just built."""
        # A head that keeps all hidden states keeps their memory until `finish`.
        ...

    def finish(self, grammar_output: GrammarOutput | None) -> tuple[StepOutput, list[mx.array]]:
        """Builds the results of the forward given to `begin`, lazily, and the arrays to compute."""
        ...
