# SPDX-License-Identifier: Apache-2.0
"""Computes bidirectional attention of a step's texts in groups of similar length.

All other parts of an encoder work per token and take a step's T rows as they are. Only attention
needs to know where texts begin. Texts are sorted by length and cut into *groups*, which are padded
to their longest text. A group continues while

    length <= PADDING * shortest + SLACK    and    texts * longest <= MAX_ROWS

so texts need little padding, texts of similar length share a call, and there are about log(longest
/ shortest) / log(PADDING) groups. A group's queries are cut into chunks that keep its scores under
MAX_SCORES per head, so a step's memory does not grow with the square of a text. With a window, a
chunk reads only keys within the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from vllm_metal.patches.mlx_patches.seam import AttendingCache, Scoring

#: Largest ratio of a group's longest to its shortest text. A step of 12 texts of 8 to 250 tokens
#: through all-MiniLM-L6-v2 (float32, one core of a busy x86 machine) took 1.13 times as long with
#: 2, 2.1 times with all texts padded to the longest, and 1.3 times when only equal lengths attended
#: together; 32 texts of 3 to 40 tokens took 1.4, 1.8 and 1.6 times as long.
PADDING = 1.25
SLACK = 8  # tokens, so that very short texts form one group
#: Limits of one group's padded rows, and of one call's scores per head.
MAX_ROWS = 2**15
MAX_SCORES = 2**20
MIN_QUERIES = 64  # minimum rows of a chunk for any scores: fewer would not pay for reading keys


@dataclass(frozen=True)
class Piece:
    """One call of attention: n texts with Q query rows and K key rows each."""

    queries: mx.array  # [n, Q] int32, rows of the step; a text's last row as padding
    keys: mx.array  # [n, K] int32, likewise
    mask: mx.array | None  # bool, [n, 1, 1, K] or [n, 1, Q, K], keys to attend to; None: all


@dataclass(frozen=True)
class Plan:
    """Attention of a step's rows in layers with one window."""

    pieces: Sequence[Piece]
    order: mx.array | None  # [T] int32, index of each row in the pieces' results; None: in order


def plan(query_start_loc_np: np.ndarray, window: int | None) -> Plan:
    """Plans a step whose requests are all complete texts.

    query_start_loc_np: [R + 1] int32, first row of each request. window: largest distance of tokens
    that attend to each other; None: unlimited.
    """
    starts_np = query_start_loc_np[:-1]
    lengths_np = np.diff(query_start_loc_np)
    pieces, rows = [], []
    for group_np in groups(lengths_np):
        for piece, rows_np in _pieces(starts_np[group_np], lengths_np[group_np], window):
            pieces.append(piece)
            rows.append(rows_np)
    rows_np = np.concatenate(rows)  # row of each result, -1 for padding
    count = int(query_start_loc_np[-1])
    if len(rows_np) == count and (rows_np == np.arange(count)).all():
        return Plan(pieces, None)
    index_np = np.zeros(count, np.int32)
    real_np = np.flatnonzero(rows_np >= 0)
    index_np[rows_np[real_np]] = real_np
    return Plan(pieces, mx.array(index_np))


def groups(lengths_np: np.ndarray) -> list[np.ndarray]:
    """Groups [R] int32 text lengths of at least 1 for shared attention calls.

    Returns [n] int64 text indices per group, shortest first; equal lengths keep the step's order.
    """
    order_np = np.argsort(lengths_np, kind="stable")
    sorted_np, found, begin = lengths_np[order_np], [], 0
    while begin < len(order_np):
        longest = PADDING * sorted_np[begin] + SLACK
        end = int(np.searchsorted(sorted_np, longest, side="right"))
        # Padded rows grow with each text, both in number and in length, so the first text over the
        # limit ends a group.
        padded_np = np.arange(1, end - begin + 1) * sorted_np[begin:end].astype(np.int64)
        end = begin + max(int(np.searchsorted(padded_np, MAX_ROWS, side="right")), 1)
        found.append(order_np[begin:end])
        begin = end
    return found


def _pieces(
    starts_np: np.ndarray, lengths_np: np.ndarray, window: int | None
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yields one group's calls, each with [n * Q] int32 rows of its results, -1 for padding."""
    count, longest = len(lengths_np), int(lengths_np.max())
    for begin, end, first, last in _chunks(count, longest, window):
        at_np = np.arange(begin, end)
        queries_np = starts_np[:, None] + np.minimum(at_np, lengths_np[:, None] - 1)
        seen_np = np.arange(first, last)
        keys_np = starts_np[:, None] + np.minimum(seen_np, lengths_np[:, None] - 1)
        mask_np = seen_np[None, None] < lengths_np[:, None, None]  # [n, 1, K]
        if window is not None and longest > window + 1:
            near_np = np.abs(at_np[:, None] - seen_np[None]) <= window  # [Q, K]
            mask_np = mask_np & near_np[None]
            mask_np[~mask_np.any(-1)] = True  # padding rows, whose results are unused
        mask = None if mask_np.all() else mx.array(mask_np[:, None])
        rows_np = np.where(at_np < lengths_np[:, None], queries_np, -1)
        piece = Piece(_indices(queries_np), _indices(keys_np), mask)
        yield piece, rows_np.reshape(-1)


def _chunks(count: int, longest: int, window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Yields each call's range of queries and range of keys, as positions in a text."""
    begin = 0
    while begin < longest:
        rows = max(MAX_SCORES // (count * longest), MIN_QUERIES)
        if window is not None and rows < longest:
            # A chunk reads its own rows as keys, plus one window on each side.
            rows = max(min(rows, 2 * window), MIN_QUERIES)
        end = min(begin + rows, longest)
        if window is None:
            yield begin, end, 0, longest
        else:
            yield begin, end, max(begin - window, 0), min(end + window, longest)
        begin = end


def _indices(rows_np: np.ndarray) -> mx.array:
    return mx.array(rows_np.astype(np.int32))


class TextAttention(AttendingCache):
    """Computes attention of one kind of layer in a step; modules receive it as cache or mask."""

    def __init__(self, plan: Plan, positions: mx.array) -> None:
        """positions: [T] int32, position of each row in its text."""
        self._plan = plan
        self._positions = positions

    @property
    def offset(self) -> mx.array:
        return self._positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, scoring: Scoring
    ) -> mx.array:
        """Attends [T, H, 1, D] queries to the keys of their texts; returns [T, H, 1, D].

        Raises NotImplementedError: the layer caps its scores, or adds a bias.
        """
        if scoring.softcap is not None or scoring.bias is not None:
            raise NotImplementedError(
                "a soft cap or bias of attention scores is not supported in encoders"
            )
        q, k, v = (array[:, :, 0] for array in (queries, keys, values))  # [T, H, D]
        found = [_attend(piece, q, k, v, scoring) for piece in self._plan.pieces]
        out = found[0] if len(found) == 1 else mx.concatenate(found)
        if self._plan.order is not None:
            out = out[self._plan.order]
        return out[:, :, None]


def _attend(
    piece: Piece, queries: mx.array, keys: mx.array, values: mx.array, scoring: Scoring
) -> mx.array:
    """Returns [n * Q, H, D] results of a piece's queries, including padding."""
    q = queries[piece.queries].transpose(0, 2, 1, 3)
    k = keys[piece.keys].transpose(0, 2, 1, 3)
    v = values[piece.keys].transpose(0, 2, 1, 3)
    out = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=scoring.scale, mask=piece.mask, sinks=scoring.sinks
    )
    return out.transpose(0, 2, 1, 3).reshape(-1, *queries.shape[1:2], values.shape[-1])
