# SPDX-License-Identifier: Apache-2.0
"""A step's rows as sequences, for layers that go from token to token.

vLLM gives a request one block for the state at its newest token. While it runs, that is the block
in which the token lies; where a block is full, it keeps the state after its last token, and the
next block of the request's table has the newer ones ("align" of `--mamba-cache-mode`). A prefill's
chunk leaves out the blocks between its first and its last: these are block 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from vllm_metal.engine.kv_cache.layer_state import StepLayout


@dataclass(frozen=True)
class Run:
    """Sequences of one length that are computed in one call."""

    rows: mx.array  # [n, L] int32, of the step's
    requests: mx.array | None  # [n] int32, whose they are; None: of all, in order
    kept: mx.array | None  # [k] int32, of the n: those whose last state may be wanted; None: all


@dataclass(eq=False)
class Endings:
    """End states of a step: one per full block and one per request or draft, in order of the runs.

    It remembers what `wanted` has found, because all layers of a step ask the same.
    """

    rows_np: np.ndarray  # [E] int, the row that each comes after
    requests_np: np.ndarray  # [E] int, of the R
    blocks_np: np.ndarray  # [E] int32, where it is to be kept; 0: nowhere
    full_np: np.ndarray  # [E] bool, whether the block is full then
    last_rows_np: np.ndarray  # [R] int, the last one of each request
    drafted: bool  # whether rows may be rejected
    _found: list[tuple[np.ndarray | None, np.ndarray]] = field(
        init=False, default_factory=list, repr=False
    )

    def wanted(self, last_rows_np: np.ndarray | None) -> np.ndarray:
        """[k] int, which of the E are to be kept: those of full blocks, and each request's last.

        Args:
            last_rows_np: [R], of each request the row of its last token that was accepted; None:
                none had drafts.

        Raises:
            RuntimeError: there were drafts, and nobody has said which were accepted.
        """
        for given, found in self._found:
            if given is last_rows_np:
                return found
        if last_rows_np is None and self.drafted:
            raise RuntimeError(
                "recurrent states were requested before the step's drafts were verified"
            )
        last_np = self.last_rows_np if last_rows_np is None else last_rows_np
        last = last_np[self.requests_np]
        wanted = (self.rows_np == last) | (self.full_np & (self.rows_np < last))
        found = np.flatnonzero(wanted & (self.blocks_np != 0))
        self._found.append((last_rows_np, found))
        return found


@dataclass(frozen=True)
class RunPlan:
    """A step of one KV cache group."""

    before: mx.array  # [R] int32, the block of each request's state
    fresh: mx.array | None  # [R] bool, whether it has none yet; None: all have one
    runs: tuple[Run, ...]
    places: mx.array | None  # [T] int32, where the runs' rows have each row; None: as they come
    endings: Endings = field(compare=False)

    @staticmethod
    def from_layout(layout: StepLayout) -> RunPlan:
        """Rows of many lengths as runs of powers of two.

        So the number of calls grows with the logarithm of the longest prompt, and with the drafts
        of a request, but not with the number of requests. Padding would not do: most of mlx-lm's
        layers go on through padded rows.
        """
        starts_np, counts_np = layout.query_start_loc_np[:-1], np.diff(layout.query_start_loc_np)
        begins_np = layout.seq_lens_np - counts_np  # position of the first row
        requests_np = np.arange(len(counts_np))
        before_np = layout.block_tables_np[
            requests_np, np.maximum(begins_np - 1, 0) // layout.block_size
        ]
        fresh_np = begins_np == 0
        runs, places_np, endings = _runs(layout, starts_np, counts_np, begins_np)
        in_order = np.array_equal(places_np, np.arange(len(places_np)))
        return RunPlan(
            mx.array(before_np.astype(np.int32)),
            mx.array(fresh_np) if fresh_np.any() else None,
            runs,
            None if in_order else mx.array(places_np),
            endings,
        )


def _runs(
    layout: StepLayout, starts_np: np.ndarray, counts_np: np.ndarray, begins_np: np.ndarray
) -> tuple[tuple[Run, ...], np.ndarray, Endings]:
    """The runs, [T] int32 where they have each row, and what they end with.

    Args:
        layout: of the group.
        starts_np: [R], each request's first row.
        counts_np: [R], its number of rows.
        begins_np: [R], its first row's position.
    """
    num_reqs, block_size = len(counts_np), layout.block_size
    lengths_np, ends_np = _parts(layout, counts_np, begins_np)
    done_np, at_np = starts_np.astype(np.int64), np.zeros(num_reqs, np.int64)
    everyone = np.arange(num_reqs)
    runs: list[Run] = []
    order: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    requests: list[np.ndarray] = []
    while (longest := int((next_np := lengths_np[everyone, at_np]).max())) > 0:
        who = np.flatnonzero(next_np == longest)
        run_rows = done_np[who, None] + np.arange(longest)
        kept = np.flatnonzero(ends_np[who, at_np[who]])
        order.append(run_rows.ravel())
        rows.append(run_rows[kept, -1])
        requests.append(who[kept])
        runs.append(
            Run(
                mx.array(run_rows.astype(np.int32)),
                None if len(who) == num_reqs else mx.array(who.astype(np.int32)),
                None if len(kept) == len(who) else mx.array(kept.astype(np.int32)),
            )
        )
        done_np[who] += longest
        at_np[who] += 1
    taken = np.concatenate(order)
    places_np = np.empty(len(taken), np.int32)
    places_np[taken] = np.arange(len(taken))
    rows_np, requests_np = np.concatenate(rows), np.concatenate(requests)
    positions_np = begins_np[requests_np] + rows_np - starts_np[requests_np]
    return (
        tuple(runs),
        places_np,
        Endings(
            rows_np,
            requests_np,
            layout.block_tables_np[requests_np, positions_np // block_size],
            (positions_np + 1) % block_size == 0,
            starts_np + counts_np - 1,
            layout.num_drafts_np is not None and bool(layout.num_drafts_np.any()),
        ),
    )


def _parts(
    layout: StepLayout, counts_np: np.ndarray, begins_np: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Each request's rows cut into powers of two, the longest first between two endings.

    A request has an ending after its last row that is no draft, after each draft, and wherever a
    block of its own is full.

    Returns:
        [R, P + 1] lengths, 0 behind a request's last; and whether each is followed by an ending.
    """
    drafts_np = layout.num_drafts_np
    if drafts_np is None:
        drafts_np = np.zeros_like(counts_np)
    parts: list[list[int]] = []
    ends: list[list[bool]] = []
    of_request = zip(counts_np.tolist(), drafts_np.tolist(), begins_np.tolist(), strict=True)
    for index, (count, drafts, begin) in enumerate(of_request):
        lengths, ended = [], []
        for segment in _segments(layout, index, begin, count - drafts):
            powers = [1 << bit for bit in range(segment.bit_length()) if segment >> bit & 1][::-1]
            lengths += powers
            ended += [False] * (len(powers) - 1) + [True]
        parts.append(lengths + [1] * drafts)
        ends.append(ended + [True] * drafts)
    width = max(map(len, parts)) + 1
    lengths_np = np.array([row + [0] * (width - len(row)) for row in parts])
    return lengths_np, np.array([row + [False] * (width - len(row)) for row in ends])


def _segments(layout: StepLayout, index: int, begin: int, count: int) -> list[int]:
    """Lengths of what lies between endings, of a request's rows without its drafts."""
    size = layout.block_size
    first, last = begin // size, (begin + count - 1) // size
    if first == last:
        return [count]
    full = first + np.flatnonzero(layout.block_tables_np[index, first:last])
    return np.diff([begin, *((full + 1) * size), begin + count]).tolist()
