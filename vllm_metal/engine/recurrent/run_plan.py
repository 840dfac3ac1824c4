# SPDX-License-Identifier: Apache-2.0
"""Splits a step's tokens into runs, for recurrent layers whose modules take sequences.

`sequence_plan` explains which blocks of the pool have a request's states.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from vllm_metal.engine.kv_cache.layer_state import StepLayout


@dataclass(frozen=True)
class Run:
    """Sequences of one length that are computed in one call."""

    rows: mx.array  # [n, L] int32, indices of tokens in the step
    requests: mx.array | None  # [n] int32, their requests; None: all, in order
    kept: mx.array | None  # [k] int32, sequences whose last state may be needed; None: all


@dataclass(eq=False)
class Endings:
    """End states of a step in run order: one per full block and one per request or draft."""

    rows_np: np.ndarray  # [E] int, last token of each
    requests_np: np.ndarray  # [E] int, request of each
    blocks_np: np.ndarray  # [E] int32, block to store it in; 0: none
    full_np: np.ndarray  # [E] bool, whether it fills the block
    last_rows_np: np.ndarray  # [R] int, each request's last token
    drafted: bool  # whether tokens may be rejected
    # Cached results of `wanted`, which all layers of a step call with the same argument.
    _found: list[tuple[np.ndarray | None, np.ndarray]] = field(
        init=False, default_factory=list, repr=False
    )

    def wanted(self, last_rows_np: np.ndarray | None) -> np.ndarray:
        """Returns [k] int, states to store: those of full blocks and each request's last one.

        Args:
            last_rows_np: [R], index of each request's last accepted token; None: no drafts.

        Raises:
            RuntimeError: the step's drafts are not verified yet.
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
    """A step's runs, and the blocks of its states, for one KV cache group."""

    before: mx.array  # [R] int32, block of each request's state
    fresh: mx.array | None  # [R] bool, requests without a state; None: all have one
    runs: tuple[Run, ...]
    order: mx.array | None  # [T] int32, index of each token in the joined runs; None: in order
    endings: Endings = field(compare=False)

    @staticmethod
    def from_layout(layout: StepLayout) -> RunPlan:
        """Splits requests of any lengths into runs whose lengths are powers of two."""
        starts_np, counts_np = layout.query_start_loc_np[:-1], np.diff(layout.query_start_loc_np)
        begins_np = layout.seq_lens_np - counts_np  # position of the first token
        requests_np = np.arange(len(counts_np))
        before_np = layout.block_tables_np[
            requests_np, np.maximum(begins_np - 1, 0) // layout.block_size
        ]
        fresh_np = begins_np == 0
        # Powers of two: the number of calls grows with the logarithm of the longest prompt and with
        # the drafts of a request, but not with the number of requests. Padding would be wrong: most
        # of mlx-lm's layers update their states with padding, too.
        runs, index_np, endings = _runs(layout, starts_np, counts_np, begins_np)
        in_order = np.array_equal(index_np, np.arange(len(index_np)))
        return RunPlan(
            mx.array(before_np.astype(np.int32)),
            mx.array(fresh_np) if fresh_np.any() else None,
            runs,
            None if in_order else mx.array(index_np),
            endings,
        )


def _runs(
    layout: StepLayout, starts_np: np.ndarray, counts_np: np.ndarray, begins_np: np.ndarray
) -> tuple[tuple[Run, ...], np.ndarray, Endings]:
    """Returns the runs, [T] int32 index of each token in them, and their end states.

    Args:
        starts_np: [R], index of each request's first token.
        counts_np: [R], its number of tokens.
        begins_np: [R], position of its first token.
    """
    num_reqs, block_size = len(counts_np), layout.block_size
    lengths_np, ends_np = _parts(layout, counts_np, begins_np)
    done_np, at_np = starts_np.astype(np.int64), np.zeros(num_reqs, np.int64)
    all_requests = np.arange(num_reqs)
    runs: list[Run] = []
    order: list[np.ndarray] = []
    rows: list[np.ndarray] = []
    requests: list[np.ndarray] = []
    # Longest parts first; each pass computes all requests whose next part has that length.
    while (longest := int((next_np := lengths_np[all_requests, at_np]).max())) > 0:
        picked = np.flatnonzero(next_np == longest)
        run_rows = done_np[picked, None] + np.arange(longest)
        kept = np.flatnonzero(ends_np[picked, at_np[picked]])
        order.append(run_rows.ravel())
        rows.append(run_rows[kept, -1])
        requests.append(picked[kept])
        runs.append(
            Run(
                mx.array(run_rows.astype(np.int32)),
                None if len(picked) == num_reqs else mx.array(picked.astype(np.int32)),
                None if len(kept) == len(picked) else mx.array(kept.astype(np.int32)),
            )
        )
        done_np[picked] += longest
        at_np[picked] += 1
    taken = np.concatenate(order)
    index_np = np.empty(len(taken), np.int32)
    index_np[taken] = np.arange(len(taken))
    rows_np, requests_np = np.concatenate(rows), np.concatenate(requests)
    positions_np = begins_np[requests_np] + rows_np - starts_np[requests_np]
    return (
        tuple(runs),
        index_np,
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
    """Splits each request into powers of two, the longest first between two end states.

    A request has an end state after its last token that is not a draft, after each draft, and
    wherever one of its own blocks is full. Returns [R, P + 1] lengths, padded with 0, and whether
    an end state follows each.
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
    """Returns lengths between end states of a request, without its drafts."""
    size = layout.block_size
    first, last = begin // size, (begin + count - 1) // size
    if first == last:
        return [count]
    # Block 0 marks a block that vLLM did not allocate for the prefill chunk: it stores no state.
    full = first + np.flatnonzero(layout.block_tables_np[index, first:last])
    return np.diff([begin, *((full + 1) * size), begin + count]).tolist()
