# SPDX-License-Identifier: Apache-2.0
"""Runs passes of a draft network over the pool, and submits them together where possible."""

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
    """Inputs of one pass over T tokens."""

    input_ids: mx.array  # [T] int32
    positions: mx.array  # [T] int32
    hidden: mx.array | None  # [T, ...], for networks that take more than tokens
    wanted: mx.array | None  # [N] int32, rows whose next tokens are wanted; None: all
    embeddings: mx.array | None = None  # [T, H], in place of those of `input_ids`
    extras: tuple[tuple[str, mx.array], ...] = ()  # see ForwardInputs
    count: int = 1  # drafts of each request, for networks that make several in a pass


class PassNetwork(ABC):
    """A draft network as `Passes` calls it."""

    module: nn.Module  # with its weights

    def placed(self, inputs: PassInputs, rows: Rows) -> PassInputs:
        """Replaces the positions by those that the network rotates by.

        Args:
            inputs: their positions are each token's index in its request.
            rows: the tokens of the pass.
        """
        return inputs

    @abstractmethod
    def next_tokens(
        self, inputs: PassInputs, caches: list[Any]
    ) -> tuple[mx.array, mx.array | None]:
        """Predicts the next token after each of the N wanted ones of a pass.

        Args:
            inputs: the pass's inputs.
            caches: one per layer, for the tokens of the pass.

        Returns:
            [N] int32 likeliest tokens, and [N, ...] hidden states if the next pass reads any.
        """


class Passes:
    """Builds and submits the passes of one network, as compiled graphs for shapes that recur.

    Consecutive passes of one token per request are submitted together. One graph serves all of
    them, since positions, tokens, plans and the outputs of the pass before are its inputs.
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
            network: the draft network.
            paged: the network's layers over the shared pool.
            tables: the requests' block tables.
            graphs: says whether passes may be compiled, and counts the compiled ones.
            most: most passes that are submitted together.
        """
        self._network = network
        self._paged = paged
        self._tables = tables
        self._most = most
        placed = network.module, paged.own_states, graphs
        self._forward = CompiledForward(self._build, *placed)

    def first(
        self,
        rows: Rows,
        hidden: mx.array | None,
        embeddings: mx.array | None = None,
        count: int = 1,
    ) -> tuple[mx.array, mx.array | None]:
        """Submits one pass with any number of tokens per request.

        Args:
            rows: T tokens; the next token is predicted after N of them.
            hidden: [T, ...] hidden states; None for networks that read only tokens.
            embeddings: [T, H], replace the tokens' own embeddings.
            count: see PassInputs.

        Returns:
            [N] int32 predicted tokens, and [N, ...] hidden states if the next pass reads any.
        """
        self._paged.begin_step()
        found = self._pass(rows, rows.input_ids, hidden, None, embeddings, count)
        self._submit(found)
        return _parted(found)

    def together(self, forwards: Sequence[Rows], hidden: mx.array | None) -> mx.array:
        """Submits n passes of one token per request; returns the predicted tokens, [R, n] int32.

        Args:
            forwards: inputs of each pass; all but the first read the tokens that the pass before
                predicted.
            hidden: [R, ...] hidden states for the first pass.
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
        count: int = 1,
    ) -> list[mx.array]:
        plans = self._paged.plans(rows, self._tables, earlier)
        given = input_ids, rows.positions, hidden, rows.logits_indices, embeddings
        inputs = PassInputs(*given, count=count)
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
    """Splits a pass's arrays into tokens and, if there are any, hidden states."""
    tokens, *hidden = found
    return tokens, hidden[0] if hidden else None


def single_rows(
    spans: Spans, limits_np: np.ndarray, tokens: mx.array, lag: PositionLag | None
) -> list[Rows]:
    """Inputs of consecutive passes with one token per request, one pass for each draft.

    All passes include all requests, so that shapes recur if requests want different numbers of
    drafts. A request that has all its drafts repeats its last position; these K/V are not stored,
    since its blocks have no room for more.

    Args:
        spans: positions of the first pass, one token of each of R requests.
        limits_np: [R] drafts of each request, at least 1.
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
    """Extends all spans to the longest one's length, if that at most doubles the tokens.

    So shapes recur if requests had different numbers of drafts accepted. The results of the tokens
    added before a span are not used, and their K/V are not stored.

    Returns:
        Spans of R requests with T tokens, and [T] int32: each token's index before, -1 if added.
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
