# SPDX-License-Identifier: Apache-2.0
"""Passes of a draft network over the pool: the first by itself, all after it handed over as one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from metal_kernels.layout import PositionLag
from vllm_metal.batch.requests import BlockTables
from vllm_metal.batch.rows import Rows
from vllm_metal.mlx_patches.traced_layers import TransposedWeights
from vllm_metal.models.compiled import CompiledForward, Graphs
from vllm_metal.models.paged_layers import PagedLayers
from vllm_metal.spec_decode.spans import Spans


@dataclass(frozen=True)
class PassInputs:
    """What one pass of T rows reads."""

    input_ids: mx.array  # [T] int32
    positions: mx.array  # [T] int32
    hidden: mx.array | None  # [T, ...], for networks that take more than tokens
    wanted: mx.array | None  # [N] int32, rows whose next tokens are wanted; None: all


class PassNetwork(ABC):
    """A draft network as its passes call it."""

    module: nn.Module  # with its weights

    @abstractmethod
    def next_tokens(
        self, inputs: PassInputs, caches: list[Any]
    ) -> tuple[mx.array, mx.array | None]:
        """The likeliest next token of N rows, and what the pass after it needs of them.

        Args:
            inputs: of the rows.
            caches: of the layers, for these rows.

        Returns:
            [N] int32 tokens, [N, ...] hidden.
        """


@dataclass(frozen=True)
class _FurtherInputs:
    """What passes of one row a request read, of R requests."""

    input_ids: mx.array  # [R] int32, of the first of them
    positions: tuple[mx.array, ...]  # [R] int32, of each pass
    hidden: mx.array | None  # [R, ...], for the first of them


class Passes:
    """Hands over the passes of one network; those of shapes that come again as compiled graphs.

    A graph of all further passes reads positions and plans of each, and the pool as the first pass
    leaves it: the host lays all of them out, and hands them over, at once.
    """

    def __init__(
        self, network: PassNetwork, paged: PagedLayers, tables: BlockTables, graphs: Graphs
    ) -> None:
        """
        Args:
            network: that drafts.
            paged: its layers, over the shared pool.
            tables: the requests' blocks.
            graphs: whether passes may be built by graphs, and where such are counted.
        """
        self._network = network
        self._paged = paged
        self._tables = tables
        weights = TransposedWeights(network.module)
        placed = weights, paged.own_states, graphs
        self._first = CompiledForward(self._build_first, *placed)
        self._further = CompiledForward(self._build_further, *placed)

    def first(self, rows: Rows, hidden: mx.array | None) -> tuple[mx.array, mx.array | None]:
        """A pass by itself.

        Args:
            rows: T rows, tokens wanted of N.
            hidden: [T, ...] of each row.

        Returns:
            [N] int32 tokens, [N, ...] hidden.
        """
        self._paged.begin_step()
        plans = self._paged.plans([rows], self._tables)
        inputs = PassInputs(rows.input_ids, rows.positions, hidden, rows.logits_indices)
        found = self._first(inputs, plans, len(rows.positions_np))
        self._hand_over(found)
        tokens, *others = found
        return tokens, others[0] if others else None

    def further(self, forwards: Sequence[Rows], hidden: mx.array | None) -> mx.array:
        """[R, n] int32, the tokens that n passes of one row of R requests give.

        Args:
            forwards: the rows of each pass; tokens are those of the pass before.
            hidden: [R, ...] of the first of them.
        """
        self._paged.begin_step()
        plans = self._paged.plans(forwards, self._tables)
        positions = tuple(rows.positions for rows in forwards)
        first = forwards[0]
        inputs = _FurtherInputs(first.input_ids, positions, hidden)
        found = self._further(inputs, plans, len(first.positions_np))
        self._hand_over(found)
        return found[0]

    def _build_first(self, inputs: PassInputs, plans: Sequence[Any]) -> list[mx.array]:
        with self._paged.during(inputs.positions, plans) as caches:
            tokens, hidden = self._network.next_tokens(inputs, caches)
        return [tokens] if hidden is None else [tokens, hidden]

    def _build_further(self, inputs: _FurtherInputs, plans: Sequence[Any]) -> list[mx.array]:
        tokens, hidden, columns = inputs.input_ids, inputs.hidden, []
        count = self._paged.num_scopes
        for number, positions in enumerate(inputs.positions):
            of_pass = plans[number * count : (number + 1) * count]
            with self._paged.during(positions, of_pass) as caches:
                given = PassInputs(tokens, positions, hidden, None)
                tokens, hidden = self._network.next_tokens(given, caches)
            columns.append(tokens)
        return [mx.stack(columns, axis=1)]

    def _hand_over(self, arrays: list[mx.array]) -> None:
        if self._paged.pipelined:
            mx.async_eval(arrays)  # the device works while the host lays out what follows
        else:
            mx.eval(arrays)  # scatter writes when all reads are done, see kv_cache.scatter


def further_rows(
    spans: Spans, limits_np: np.ndarray, tokens: mx.array, behind: PositionLag | None
) -> list[Rows]:
    """Rows of the passes after the first: of each request one, for all its drafts but the last.

    All passes are of all the requests, so that shapes stay where requests want unlike many drafts.
    One that has its drafts goes on at its last position, for nothing: its K/V are not kept, for the
    blocks have no room for more.

    Args:
        spans: of R requests, the first pass.
        limits_np: [R] drafts of each, from 2.
        tokens: [R] int32, the first draft of each.
        behind: of the spans' ends; None: they are exact.
    """
    found = []
    for number in range(int(limits_np.max()) - 1):
        positions_np = spans.ends_np + np.minimum(number, limits_np - 2).astype(np.int32)
        single = Spans(spans.req_indices_np, positions_np, positions_np + 1)
        wanted_np = number < limits_np - 1
        stored_np = None if wanted_np.all() else wanted_np
        found.append(single.rows(tokens, None, behind, stored_np))
    return found
