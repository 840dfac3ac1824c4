# SPDX-License-Identifier: Apache-2.0
"""StepEnd: what a step makes of its hidden states, tokens or embeddings say."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from vllm_metal.engine.batch.per_request_state import PerRequestState

if TYPE_CHECKING:
    import mlx.core as mx
    from vllm.v1.core.sched.output import GrammarOutput

    from vllm_metal.engine.batch.input_batch import InputBatch
    from vllm_metal.engine.batch.outputs import StepOutput


class OutputHead(PerRequestState, Protocol):
    """Turns the hidden states of a step into its results; a column, for what requests ask of it."""

    #: Whether `finish` needs nothing more of the scheduler, a grammar's mask say. vLLM then gets
    #: the results of a step in return for its word of it, and never asks for samples.
    at_once: ClassVar[bool] = False

    @property
    def needs_host_tokens(self) -> bool:
        """Whether `finish` reads the tokens of earlier steps, which the host must know by then."""
        return False

    def begin(self, batch: InputBatch, hidden_states: mx.array) -> None:
        """Takes what it needs of a forward that has just been built; lazy.

        Args:
            batch: the step's rows.
            hidden_states: [T, 1, H]. Whoever keeps all of them keeps their memory.
        """
        ...

    def finish(self, grammar_output: GrammarOutput | None) -> tuple[StepOutput, list[mx.array]]:
        """Builds the results of the forward begun last; lazy.

        Returns:
            The results, and all that the device has to compute for the step.
        """
        ...
