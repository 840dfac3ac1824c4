# SPDX-License-Identifier: Apache-2.0
"""Runs an encoder over whole texts without a pool."""

from __future__ import annotations

import mlx.core as mx

from vllm_metal.engine.attention.forward_inputs import ForwardInputs, bound
from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.models.paged_layers import PagedLayers
from vllm_metal.engine.pooling.encoders.attention import TextAttention, plan
from vllm_metal.engine.pooling.encoders.networks import Encoder, with_positions


class EncoderExecutor(PagedLayers):
    """Runs an encoder, which keeps no state between steps."""

    def __init__(self, encoder: Encoder, block_size: int) -> None:
        # PagedLayers needs a block size, although the scheduler has no blocks to allocate.
        super().__init__((), {}, {}, block_size)
        self._encoder = encoder

    def forward_hidden(
        self, rows: Rows, block_tables: BlockTables | None, inputs: ForwardInputs | None = None
    ) -> mx.array:
        """Returns lazy [T, 1, H] hidden states of a step's whole texts.

        block_tables: unused. inputs: the model's inputs; None: `rows.inputs`.

        Raises RuntimeError: part of a text is missing.
        """
        if (rows.positions_np[rows.query_start_loc_np[:-1]] != 0).any():
            raise RuntimeError(
                "an encoder received part of a text, but attends to whole texts only"
            )
        inputs = with_positions(inputs or rows.inputs)
        positions = inputs.positions[0]
        attention = {
            window: TextAttention(plan(rows.query_start_loc_np, window), positions)
            for window in self._encoder.windows
        }
        with bound(inputs):
            return self._encoder.hidden(inputs, attention)
