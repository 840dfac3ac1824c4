# SPDX-License-Identifier: Apache-2.0
"""Passes of a draft network over the pool: their rows, and which are handed over together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from metal_kernels.layout import PositionLag
from vllm_metal.engine.batch.requests import BlockTables
from vllm_metal.engine.batch.rows import Rows
from vllm_metal.engine.models.compiled import CompiledForward, Graphs
from vllm_metal.engine.models.paged_layers import EarlierSlots, PagedLayers
from vllm_metal.engine.spec_decode.spans import Spans


@dataclass(frozen=True)
class PassInputs:
    """What one pass of T rows reads."""

    input_ids: mx.array  # [T] int32
    positions: mx.array  # [T] int32
    hidden: mx.array | None  # [T, ...], for networks that take more than tokens
    wanted: mx.array | None  # [N] int32, rows whose next tokens are wanted; None: all
    embeddings: mx.array | None = None  # [T, H], in place of those of `input_ids`
    extras: tuple[tuple[str, mx.array], ...] = ()  # see ForwardInputs


class PassNetwork(ABC):
    """A draft network as its passes call it."""

    module: nn.Module  # with its weights

    def placed(self, inputs: PassInputs, rows: Rows) -> PassInputs:
        """The inputs of a pass with the positions that the network rotates by.

        Args:
            inputs: whose positions are the rows' indices in their requests.
            rows: of the pass.
        """
        return inputs

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


class Passes:
    """Hands over the passes of one network; those of shapes that come again as compiled graphs.

    Passes of one row a request are handed over together, whatever their number. One graph serves
    them all: positions, tokens and plans are its inputs, and so is what those before leave.
    """

    def __init__(
        self,
        network: PassNetwork,
        paged: PagedLayers,
        tables: BlockTables,
        graphs: Graphs,
        most: int,
    ) -> None:
        """
        Args:
            network: that drafts.
            paged: its layers, over the shared pool.
            tables: the requests' blocks.
            graphs: whether passes may be built by graphs, and where such are counted.
            most: passes that are handed over together, at most.
        """
        self._network = network
        self._paged = paged
        self._tables = tables
        self._most = most
        placed = network.module, paged.own_states, graphs
        self._forward = CompiledForward(self._build, *placed)

    def first(
        self, rows: Rows, hidden: mx.array | None, embeddings: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """A pass by itself, of any rows.

        Args:
            rows: T rows, tokens wanted of N.
            hidden: [T, ...] of each row.
            embeddings: [T, H], in place of those of the rows' tokens.

        Returns:
            [N] int32 tokens, [N, ...] hidden.
        """
        self._paged.begin_step()
        found = self._pass(rows, rows.input_ids, hidden, None, embeddings)
        self._submit(found)
        return _parted(found)

    def together(self, forwards: Sequence[Rows], hidden: mx.array | None) -> mx.array:
        """[R, n] int32, the tokens that n passes of one row of R requests give.

        Args:
            forwards: the rows of each pass; but for the first, their tokens are those of the pass
                before.
            hidden: [R, ...] of the first of them.
        """
        self._paged.begin_step()
        tokens = forwards[0].input_ids
        earlier = EarlierSlots(self._most, len(forwards[0].positions_np))
        columns = []
        for rows in forwards:
            tokens, hidden = _parted(self._pass(rows, tokens, hidden, earlier))
            columns.append(tokens)
        drafts = mx.stack(columns, axis=1)
        self._submit([drafts])
        return drafts

    def _pass(
        self,
        rows: Rows,
        input_ids: mx.array,
        hidden: mx.array | None,
        earlier: EarlierSlots | None,
        embeddings: mx.array | None = None,
    ) -> list[mx.array]:
        plans = self._paged.plans(rows, self._tables, earlier)
        inputs = PassInputs(input_ids, rows.positions, hidden, rows.logits_indices, embeddings)
        placed = self._network.placed(inputs, rows)
        return self._forward(placed, plans, len(rows.positions_np))

    def _build(self, inputs: PassInputs, plans: Sequence[object]) -> list[mx.array]:
        with self._paged.during(inputs.positions, plans) as caches:
            tokens, hidden = self._network.next_tokens(inputs, caches)
        return [tokens] if hidden is None else [tokens, hidden]

    def _submit(self, arrays: list[mx.array]) -> None:
        if self._paged.pipelined:
            mx.async_eval(arrays)  # the device works while the host lays out what follows
        else:
            mx.eval(arrays)  # scatter writes when all reads are done, see kv_cache.scatter


def _parted(found: list[mx.array]) -> tuple[mx.array, mx.array | None]:
    """Tokens, and hidden where there are such."""
    tokens, *hidden = found
    return tokens, hidden[0] if hidden else None


def single_rows(
    spans: Spans, limits_np: np.ndarray, tokens: mx.array, lag: PositionLag | None
) -> list[Rows]:
    """Rows of passes one after the other: of each request one, for each of its drafts.

    All passes are of all the requests, so that shapes stay where requests want unlike many drafts.
    One that has its drafts goes on at its last position, for nothing: its K/V are not kept, for the
    blocks have no room for more.

    Args:
        spans: of R requests, one row each: the first pass.
        limits_np: [R] drafts of each, from 1.
        tokens: [R] int32, of the first pass.
        lag: how far the spans' positions exceed the requests' true ones; None: they are exact.
    """
    found = []
    for number in range(int(limits_np.max())):
        positions_np = spans.starts_np + np.minimum(number, limits_np - 1).astype(np.int32)
        single = Spans(spans.req_indices_np, positions_np, positions_np + 1)
        wanted_np = number < limits_np
        stored_np = None if wanted_np.all() else wanted_np
        found.append(single.rows(tokens, None, lag, stored_np))
    return found


def evened(spans: Spans) -> tuple[Spans, np.ndarray]:
    """The spans, all as long as the longest where that at most doubles their rows.

    So shapes stay where requests have had unlike many drafts accepted. Rows that are put before a
    request's compute what nobody reads, and keep no K/V.

    Returns:
        Spans of R requests and T rows, and [T] int32: of each row the row that it was, -1 for one
        that is new.
    """
    lens_np = spans.ends_np - spans.starts_np
    longest = int(lens_np.max())
    rows_np = np.arange(len(spans.index_np), dtype=np.int32)
    room = bool((spans.ends_np >= longest).all())
    if not room or longest * len(lens_np) > 2 * len(rows_np):
        return spans, rows_np
    columns_np = np.arange(longest) - (longest - lens_np)[:, None]
    places_np = np.where(columns_np < 0, -1, spans.query_start_loc_np[:-1, None] + columns_np)
    even = Spans(spans.req_indices_np, spans.ends_np - np.int32(longest), spans.ends_np)
    return even, places_np.astype(np.int32).ravel()
