# SPDX-License-Identifier: Apache-2.0
"""Which threadgroup works on what: once a step, for all layers of one shape and window."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

# Threadgroups that keep a large GPU busy (an M3 Ultra has 80 cores), and the shortest part of a
# context worth a threadgroup of its own: below it the reduction costs more than it saves.
_BUSY = 128
_SHORTEST_SPLIT = 256
_NO_WINDOW = 2**31 - 1
_STRIP = 4  # decode.metal walks the context in such steps; a tile starts at a multiple


@dataclass(frozen=True)
class AttentionShape:
    """Of one layer's attention."""

    num_heads: int  # H
    num_kv_heads: int  # Hkv
    head_size: int  # D, of queries and keys
    value_size: int  # DV; less than D only where values are the head of the keys (MLA's latent)

    @property
    def latent(self) -> bool:
        return self.value_size != self.head_size

    @property
    def group(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def decode_rows(self) -> int:
        """Packed rows the decode kernel takes: as many as fit a thread's registers."""
        return 0 if self.latent else min(8, 1 << (1024 // self.head_size).bit_length() - 1)

    @property
    def tile_rows(self) -> int:
        """Packed rows of the prefill kernel's largest tile."""
        return 64 if self.head_size <= 256 else 32


@dataclass(frozen=True)
class Dispatch:
    """One launch of the decode or the prefill kernel; the structs of shared/attention.metal."""

    decode: bool
    rows: int  # packed rows of a tile, a power of two
    num_rows: int  # output rows, n
    num_tiles: int  # N
    num_splits: int  # S, the most that any request's context is split into
    requests: mx.array  # [max(R, 2), 4] int32, Request
    tiles: mx.array  # [N, 8] int32, Tile
    bounds: mx.array  # [8] int32, Bounds
    splits: mx.array | None  # [max(n, 8)] int32, of each output row; None: none is split


@dataclass(frozen=True)
class AttentionPlan:
    """How one step's rows attend, for all layers that share a block table, shape and window."""

    shape: AttentionShape
    num_tokens: int  # T
    dispatches: tuple[Dispatch, ...]
    block_tables: mx.array  # [R, at least 8] int32
    order: mx.array | None  # [T] int32, place of row t in the dispatches' outputs; None: as it is


def plan(
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    block_tables: np.ndarray,
    shape: AttentionShape,
    window: int | None = None,
) -> AttentionPlan:
    """Cuts R requests' rows into tiles.

    Args:
        query_start_loc: [R + 1] int32, first batch row of each request.
        seq_lens: [R] int32, context of each request including this step's rows.
        block_tables: [R, W] int32, pool blocks of each request in order.
        shape: of the layers' attention.
        window: a query at position p sees positions (p - window, p]; None sees [0, p].
    """
    query_lens = np.diff(query_start_loc)
    packed = query_lens * shape.group
    decodes = packed <= shape.decode_rows
    if packed.max() <= shape.tile_rows and not decodes.all():
        decodes[:] = False  # one dispatch for a step of verify windows, whatever their lengths
    dispatches, outputs = [], []
    for decode in (True, False):
        members = np.flatnonzero(decodes == decode)
        if not len(members):
            continue
        dispatches.append(
            _dispatch(decode, members, query_start_loc, seq_lens, shape, window or _NO_WINDOW)
        )
        lens = query_lens[members]
        before = np.repeat(query_start_loc[members] - _starts(lens), lens)
        outputs.append(before + np.arange(len(before)))
    written = np.concatenate(outputs)  # batch row of each output row
    natural = bool((written == np.arange(len(written))).all())
    table = np.zeros((len(seq_lens), max(block_tables.shape[1], 8)), np.int32)
    table[:, : block_tables.shape[1]] = block_tables
    return AttentionPlan(
        shape=shape,
        num_tokens=len(written),
        dispatches=tuple(dispatches),
        block_tables=mx.array(table),
        order=None if natural else mx.array(np.argsort(written).astype(np.int32)),
    )


def _starts(counts: np.ndarray) -> np.ndarray:
    """Where each of consecutive runs of such lengths begins."""
    return np.cumsum(counts) - counts


def _dispatch(
    decode: bool,
    members: np.ndarray,
    query_start_loc: np.ndarray,
    seq_lens: np.ndarray,
    shape: AttentionShape,
    window: int,
) -> Dispatch:
    """The launch that serves the requests `members`."""
    query_lens = np.diff(query_start_loc)[members]
    packed = query_lens * shape.group
    num_rows = int(query_lens.sum())
    most = shape.decode_rows if decode else shape.tile_rows
    rows = min(most, max(1 if decode else 8, 1 << int(packed.max() - 1).bit_length()))
    # Tiles hold whole query rows where they can, so that they end on a row's last visible key.
    step = rows // shape.group * shape.group or rows

    per_request = -(-packed // step)
    owner = np.repeat(np.arange(len(members)), per_request)
    begin_packed = (np.arange(len(owner)) - _starts(per_request)[owner]) * step
    count = np.minimum(step, packed[owner] - begin_packed)
    first = (seq_lens[members] - query_lens)[owner]  # position of the request's first row
    oldest = first + begin_packed // shape.group - window + 1
    begin = np.maximum(oldest, 0) // _STRIP * _STRIP
    end = first + (begin_packed + count - 1) // shape.group + 1

    length = _split_length(end - begin, shape.num_kv_heads)
    of_request = np.zeros(len(members), np.int64)
    np.maximum.at(of_request, owner, -(-(end - begin) // length))
    num_splits = int(of_request.max())
    tile = np.repeat(np.arange(len(owner)), of_request[owner])
    split = np.arange(len(tile)) - _starts(of_request[owner])[tile]
    split_begin = begin[tile] + split * length
    tiles = np.zeros((len(tile), 8), np.int32)
    tiles[:, 0] = members[owner[tile]]
    tiles[:, 1] = begin_packed[tile]
    tiles[:, 2] = count[tile]
    tiles[:, 3] = split_begin
    tiles[:, 4] = np.minimum(end[tile], split_begin + length)
    tiles[:, 5] = split
    # The longest first: what is started last then ends soonest.
    tiles = tiles[np.argsort(tiles[:, 3] - tiles[:, 4], kind="stable")]

    requests = np.zeros((max(len(seq_lens), 2), 4), np.int32)
    requests[members, 0] = query_start_loc[members]
    requests[members, 1] = _starts(query_lens)
    requests[members, 2] = seq_lens[members] - query_lens
    bounds = np.zeros(8, np.int32)
    bounds[:2] = window, num_rows
    splits = np.ones(max(num_rows, 8), np.int32)
    splits[:num_rows] = np.repeat(of_request, query_lens)
    return Dispatch(
        decode=decode,
        rows=rows,
        num_rows=num_rows,
        num_tiles=len(tiles),
        num_splits=num_splits,
        requests=mx.array(requests),
        tiles=mx.array(tiles),
        bounds=mx.array(bounds),
        splits=mx.array(splits) if num_splits > 1 else None,
    )


def _split_length(lengths: np.ndarray, num_kv_heads: int) -> int:
    """Keys of a part: the context is split only as far as threadgroups are lacking."""
    wanted = max(1, _BUSY // (len(lengths) * num_kv_heads))
    length = -(-int(lengths.max()) // wanted)
    return max(_SHORTEST_SPLIT, -(-length // 64) * 64)
