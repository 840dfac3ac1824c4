# SPDX-License-Identifier: Apache-2.0
"""Decides which texts of a step attend together, and attends: every token to its whole text.

All else of an encoder goes from token to token, and takes a step's T rows as they are. Only
attention has to know where texts begin. Texts are sorted by length and cut into *groups*, whose
texts are padded to the longest of them. A group goes on while

    length <= PADDING * shortest + SLACK    and    texts * longest <= MAX_ROWS

so a text pays for a little padding at most, texts of like lengths share a call, and there are
log(longest / shortest) / log(PADDING) groups, about. Queries of a group are taken in chunks of as
many rows as keep its scores under MAX_SCORES for a head: the memory of a step does not grow with
the square of a text. A chunk of a layer with a window reads no keys but those that its window
reaches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from vllm_metal.patches.mlx_patches.seam import AttendingCache, Scoring

#: How much longer than the shortest a group's texts may be. A step of 12 texts of 8 to 250 tokens
#: through all-MiniLM-L6-v2 (float32, one core of a busy x86 machine) took 1.13 times as long with 2
#: in its place, 2.1 times where all were padded to the longest, and 1.3 times where only equal
#: lengths attended together; of 32 texts of 3 to 40 tokens 1.4, 1.8 and 1.6 times.
PADDING = 1.25
SLACK = 8  # tokens: so very short texts make one group
#: Padded rows of a group, and scores of a head that one call computes.
MAX_ROWS = 2**15
MAX_SCORES = 2**20
MIN_QUERIES = 64  # rows of a chunk, whatever their scores: fewer would not pay for reading keys


@dataclass(frozen=True)
class Piece:
    """One call of attention: n texts, Q query rows and K key rows of each."""

    queries: mx.array  # [n, Q] int32, rows of the step; behind a text's end, its last row
    keys: mx.array  # [n, K] int32, likewise
    mask: mx.array | None  # bool, [n, 1, 1, K] or [n, 1, Q, K]: where to look; None: everywhere


@dataclass(frozen=True)
class Plan:
    """How the rows of a step attend in layers of one window."""

    pieces: Sequence[Piece]
    places: mx.array | None  # [T] int32, of each row in the pieces' results; None: in order


def plan(query_start_loc_np: np.ndarray, window: int | None) -> Plan:
    """Plans a step whose every request is there from its first token to its last.

    Args:
        query_start_loc_np: [R + 1] int32, where the rows of each request begin.
        window: a token sees those that are so far away, or nearer; None: all.
    """
    starts_np = query_start_loc_np[:-1]
    lengths_np = np.diff(query_start_loc_np)
    pieces, rows = [], []
    for group_np in groups(lengths_np):
        for piece, rows_np in _pieces(starts_np[group_np], lengths_np[group_np], window):
            pieces.append(piece)
            rows.append(rows_np)
    rows_np = np.concatenate(rows)  # of each result its row, -1 for padding
    count = int(query_start_loc_np[-1])
    if len(rows_np) == count and (rows_np == np.arange(count)).all():
        return Plan(pieces, None)
    places_np = np.zeros(count, np.int32)
    real_np = np.flatnonzero(rows_np >= 0)
    places_np[rows_np[real_np]] = real_np
    return Plan(pieces, mx.array(places_np))


def groups(lengths_np: np.ndarray) -> list[np.ndarray]:
    """Texts that attend together.

    Args:
        lengths_np: [R] int32, tokens of each text, 1 at least.

    Returns:
        [n] int64 each, indices of texts; shortest first, in the order of the step among equals.
    """
    order_np = np.argsort(lengths_np, kind="stable")
    sorted_np, found, begin = lengths_np[order_np], [], 0
    while begin < len(order_np):
        longest = PADDING * sorted_np[begin] + SLACK
        end = int(np.searchsorted(sorted_np, longest, side="right"))
        # Padded rows grow with each text, in number and by the longest: so the first that is too
        # many ends a group.
        padded_np = np.arange(1, end - begin + 1) * sorted_np[begin:end].astype(np.int64)
        end = begin + max(int(np.searchsorted(padded_np, MAX_ROWS, side="right")), 1)
        found.append(order_np[begin:end])
        begin = end
    return found


def _pieces(
    starts_np: np.ndarray, lengths_np: np.ndarray, window: int | None
) -> Iterator[tuple[Piece, np.ndarray]]:
    """The calls of one group, and of each [n * Q] int32: the row of a result, -1 for padding."""
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
            mask_np[~mask_np.any(-1)] = True  # rows of padding, which nobody reads
        mask = None if mask_np.all() else mx.array(mask_np[:, None])
        rows_np = np.where(at_np < lengths_np[:, None], queries_np, -1)
        piece = Piece(_indices(queries_np), _indices(keys_np), mask)
        yield piece, rows_np.reshape(-1)


def _chunks(count: int, longest: int, window: int | None) -> Iterator[tuple[int, int, int, int]]:
    """Queries and keys of each call, both as positions of a text: from, to, from, to.

    Args:
        count: texts of the group.
        longest: tokens of the longest.
        window: of the layer.
    """
    begin = 0
    while begin < longest:
        rows = max(MAX_SCORES // (count * longest), MIN_QUERIES)
        if window is not None and rows < longest:
            # A chunk of so many rows reads as many keys, and a window before and behind.
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
    """Attention of one kind of layer in one step; what a module gets as its cache, or its mask."""

    def __init__(self, plan: Plan, positions: mx.array) -> None:
        """
        Args:
            plan: of the step, for the layer's window.
            positions: [T] int32, of the rows.
        """
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
        """[T, H, 1, D] queries over the keys of their texts; [T, H, 1, D] back.

        Raises:
            NotImplementedError: the layer caps its scores.
        """
        if scoring.softcap is not None:
            raise NotImplementedError("a soft cap of attention scores is not supported in encoders")
        q, k, v = (array[:, :, 0] for array in (queries, keys, values))  # [T, H, D]
        found = [_attend(piece, q, k, v, scoring) for piece in self._plan.pieces]
        out = found[0] if len(found) == 1 else mx.concatenate(found)
        if self._plan.places is not None:
            out = out[self._plan.places]
        return out[:, :, None]


def _attend(
    piece: Piece, queries: mx.array, keys: mx.array, values: mx.array, scoring: Scoring
) -> mx.array:
    """[n * Q, H, D]: results of a piece's queries, padding included."""
    q = queries[piece.queries].transpose(0, 2, 1, 3)
    k = keys[piece.keys].transpose(0, 2, 1, 3)
    v = values[piece.keys].transpose(0, 2, 1, 3)
    out = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=scoring.scale, mask=piece.mask, sinks=scoring.sinks
    )
    return out.transpose(0, 2, 1, 3).reshape(-1, *queries.shape[1:2], values.shape[-1])
