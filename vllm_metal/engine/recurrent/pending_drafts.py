# SPDX-License-Identifier: Apache-2.0
"""Tracks requests whose drafts are not yet applied to their states, and the drafts' kept inputs.

A "kept row" is the input of a recurrent operation for one draft token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class Entries:
    """Requests whose newest step verified drafts, and the kept rows that a later step applies.

    If only the device knows a position or count exactly, the value here is too high by `lag`.
    """

    req_indices_np: np.ndarray  # [M] int32; -1: the request was removed
    steps_np: np.ndarray  # [M] int64, number of the step that verified the drafts
    certain_rows_np: np.ndarray  # [M] int32, index in that step of the last token before drafts
    first_np: np.ndarray  # [M] int32, index of the first kept row
    counts_np: np.ndarray  # [M] int32, drafts
    state_lens_np: np.ndarray  # [M] int32, number of tokens in the state
    last_np: np.ndarray  # [M] int32, position of the last draft; its block holds the state
    accepted_np: np.ndarray  # [M] int32, accepted drafts; -1: unknown to the host
    tables_np: np.ndarray  # [M, W] int32, blocks
    lag: mx.array | None  # [M] int32; None: all are exact

    def __len__(self) -> int:
        return len(self.req_indices_np)

    def select(self, indices_np: np.ndarray) -> Entries:
        columns = {name: getattr(self, name)[indices_np] for name in _COLUMNS}
        lag = None if self.lag is None else self.lag[mx.array(indices_np.astype(np.int32))]
        return Entries(**columns, lag=lag)

    def joined(self, others: Entries) -> Entries:
        """Returns these entries, then the others."""
        if not len(others):
            return self
        if not len(self):
            return others
        width = max(self.tables_np.shape[1], others.tables_np.shape[1])
        lag = None
        if self.lag is not None or others.lag is not None:
            lag = mx.concatenate([lag_of(self.lag, len(self)), lag_of(others.lag, len(others))])
        mine, theirs = (
            replace(each, tables_np=_widened(each.tables_np, width)) for each in (self, others)
        )
        columns = {
            name: np.concatenate([getattr(mine, name), getattr(theirs, name)]) for name in _COLUMNS
        }
        return Entries(**columns, lag=lag)


_COLUMNS = [field.name for field in fields(Entries) if field.name.endswith("_np")]
_NOTHING: dict[str, Any] = dict.fromkeys(_COLUMNS, np.zeros(0, np.int32))
NO_ENTRIES = Entries(**_NOTHING | {"tables_np": np.zeros((0, 1), np.int32)}, lag=None)


class PendingDrafts:
    """Entries of one KV cache group, from the step that creates them to the step that applies them.

    A request's next step applies its entry. The entry of a request without a next step is applied
    as soon as the host knows how many drafts were accepted, and carried over until then.
    """

    def __init__(self) -> None:
        self._entries = NO_ENTRIES
        self.num_rows = 0  # rows kept by the newest step for all requests
        self._step = 0
        self._rows: dict[int, np.ndarray] = {}  # query_start_loc arrays, by step

    def remove_request(self, req_idx: int) -> None:
        """Drops a request; its req_idx may be reused."""
        indices_np = self._entries.req_indices_np
        indices_np[indices_np == req_idx] = -1

    def record_accepted(self, query_start_loc_np: np.ndarray, last_rows_np: np.ndarray) -> None:
        """Records the accepted drafts of a step.

        Args:
            query_start_loc_np: the same array object that the step was planned with.
            last_rows_np: [R] int32, index in the step of each request's last accepted token.
        """
        entries = self._entries
        # The array's identity identifies the step: results come later, without a step number.
        for step, rows in self._rows.items():
            if rows is query_start_loc_np:
                here = np.flatnonzero(entries.steps_np == step)
                certain_np = entries.certain_rows_np[here]
                requests_np = np.searchsorted(query_start_loc_np, certain_np, side="right") - 1
                entries.accepted_np[here] = last_rows_np[requests_np] - certain_np

    def take(
        self, req_indices_np: np.ndarray, may_apply: np.ndarray | None = None
    ) -> tuple[Entries, np.ndarray, Entries, Entries]:
        """Removes and returns all entries; the caller puts back the last group with `add`.

        Args:
            req_indices_np: [R] int32, requests with tokens in the current step.
            may_apply: [n] int32, other requests whose drafts may be applied; None: all.

        Returns:
            Entries of requests in the step; [R] int, index of each request's entry or -1; entries
            of other requests with known results; and all remaining entries, to carry over.
        """
        entries, self._entries = self._entries, NO_ENTRIES
        found_np = np.full(len(req_indices_np), -1, np.int64)
        if not len(entries):
            return NO_ENTRIES, found_np, NO_ENTRIES, NO_ENTRIES
        most = max(int(entries.req_indices_np.max()), int(req_indices_np.max(initial=0)))
        entry_of_np = np.full(most + 2, -1)
        entry_of_np[entries.req_indices_np] = np.arange(len(entries))
        # Removed requests (-1) have written the last element.
        entry_of_np[-1] = -1
        found_np = entry_of_np[req_indices_np]
        here = found_np[found_np >= 0]
        others_np = entries.req_indices_np >= 0
        others_np[here] = False
        if not others_np.any():
            return entries, found_np, NO_ENTRIES, NO_ENTRIES
        known_np = others_np & (entries.accepted_np >= 0)
        if may_apply is not None:
            known_np &= np.isin(entries.req_indices_np, may_apply)
        rest_np = others_np & ~known_np
        return (
            entries,
            found_np,
            entries.select(np.flatnonzero(known_np)),
            entries.select(np.flatnonzero(rest_np)),
        )

    def add(self, entries: Entries, query_start_loc_np: np.ndarray, num_rows: int) -> None:
        """Stores entries; `steps_np` -1 marks the current step, which keeps `num_rows` rows."""
        self._step += 1
        self.num_rows = num_rows
        self._entries = entries
        if not len(entries):
            self._rows = {}
            return
        entries.steps_np[entries.steps_np < 0] = self._step
        rows = {**self._rows, self._step: query_start_loc_np}
        self._rows = {step: rows[step] for step in set(entries.steps_np.tolist())}


def lag_of(lag: mx.array | None, count: int) -> mx.array:
    """Returns `lag` as [count] int32; zeros for None."""
    return mx.zeros(count, mx.int32) if lag is None else lag


def _widened(tables_np: np.ndarray, width: int) -> np.ndarray:
    return np.pad(tables_np, ((0, 0), (0, width - tables_np.shape[1])))
