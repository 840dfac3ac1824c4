# SPDX-License-Identifier: Apache-2.0
"""Implements a pooler that returns hidden states unchanged, for the checks at startup."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.model_executor.layers.pooler.abstract import Pooler

if TYPE_CHECKING:
    from vllm.tasks import PoolingTask
    from vllm.v1.pool.metadata import PoolingMetadata


class AllRows(Pooler):
    """Returns [n, H] hidden states of a prompt of n tokens, in any number of chunks."""

    TASK: ClassVar[PoolingTask] = "token_embed"

    def get_supported_tasks(self) -> Set[PoolingTask]:
        return {self.TASK}

    def forward(
        self, hidden_states: torch.Tensor, pooling_metadata: PoolingMetadata
    ) -> list[torch.Tensor | None]:
        cursor = pooling_metadata.get_pooling_cursor()
        chunks = torch.split(hidden_states, cursor.num_scheduled_tokens_cpu.tolist())
        found: list[torch.Tensor | None] = []
        for states, chunk, done in zip(
            pooling_metadata.pooling_states, chunks, cursor.get_finished_mask(), strict=True
        ):
            states.hidden_states_cache.append(chunk)
            found.append(torch.concat(states.hidden_states_cache) if done else None)
        return found
