# SPDX-License-Identifier: Apache-2.0
"""KeptRows remembers which requests' drafts are not yet in their states, and where those lie."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class Entries:
    """Requests whose newest step verified drafts: each has rows that a later step applies.

    A position or count that only the device knows exactly is an upper bound here; how much it is
    too high, `lag` says.
    """

    req_indices_np: np.ndarray  # [M] int32; -1: of a request that is gone
    steps_np: np.ndarray  # [M] int64, number of the step that the drafts are of
    certain_rows_np: np.ndarray  # [M] int32, that step's last row of each that is no draft
    first_np: np.ndarray  # [M] int32, of the kept rows, the first of each
    counts_np: np.ndarray  # [M] int32, drafts
    settled_np: np.ndarray  # [M] int32, tokens that the state is after
    last_np: np.ndarray  # [M] int32, position of the last draft: the state lies in its block
    accepted_np: np.ndarray  # [M] int32, drafts that were accepted; -1: the host does not know
    tables_np: np.ndarray  # [M, W] int32, blocks of each
    lag: mx.array | None  # [M] int32; None: all are exact

    def __len__(self) -> int:
        return len(self.req_indices_np)

    def select(self, indices_np: np.ndarray) -> Entries:
        """Returns the entries at [n] indices."""
        columns = {name: getattr(self, name)[indices_np] for name in _COLUMNS}
        lag = None if self.lag is None else self.lag[mx.array(indices_np.astype(np.int32))]
        return Entries(**columns, lag=lag)

    def joined(self, others: Entries) -> Entries:
        """Returns these, then the others."""
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


class KeptRows:
    """The entries of one KV cache group, from the step that leaves them to the one that takes them.

    Those of requests that are in the next step are applied there. Of one that is not, they are
    applied as soon as the host knows how many were accepted, and until then passed on.
    """

    def __init__(self) -> None:
        self._entries = NO_ENTRIES
        self.num_rows = 0  # that the newest step kept, of all requests
        self._step = 0
        self._rows: dict[int, np.ndarray] = {}  # by step, what tells its rows apart

    def leave(self, req_idx: int) -> None:
        """A request is gone; another one may take its row."""
        indices_np = self._entries.req_indices_np
        indices_np[indices_np == req_idx] = -1

    def learn(self, query_start_loc_np: np.ndarray, last_rows_np: np.ndarray) -> None:
        """Takes the outcome of a step.

        Args:
            query_start_loc_np: the step's own array.
            last_rows_np: [R] int32, of each of its requests the row of its last token that was
                accepted.
        """
        entries = self._entries
        for step, rows in self._rows.items():
            if rows is query_start_loc_np:
                here = np.flatnonzero(entries.steps_np == step)
                certain_np = entries.certain_rows_np[here]
                requests_np = np.searchsorted(query_start_loc_np, certain_np, side="right") - 1
                entries.accepted_np[here] = last_rows_np[requests_np] - certain_np

    def take(
        self, req_indices_np: np.ndarray, settle: np.ndarray | None = None
    ) -> tuple[Entries, np.ndarray, Entries, Entries]:
        """Takes all entries out; what is passed on comes back by `add`.

        Args:
            req_indices_np: [R] int32, requests that have rows in the step at hand.
            settle: [n] int32, requests that may be settled besides; None: all.

        Returns:
            Entries of requests in the step; [R] int which of these is each request's, -1 for none;
            those of other requests whose outcome is known; and those to be passed on.
        """
        entries, self._entries = self._entries, NO_ENTRIES
        found_np = np.full(len(req_indices_np), -1, np.int64)
        if not len(entries):
            return NO_ENTRIES, found_np, NO_ENTRIES, NO_ENTRIES
        most = max(int(entries.req_indices_np.max()), int(req_indices_np.max(initial=0)))
        place_np = np.full(most + 2, -1)
        place_np[entries.req_indices_np] = np.arange(len(entries))
        place_np[-1] = -1
        found_np = place_np[req_indices_np]
        here = found_np[found_np >= 0]
        others_np = entries.req_indices_np >= 0
        others_np[here] = False
        if not others_np.any():
            return entries, found_np, NO_ENTRIES, NO_ENTRIES
        known_np = others_np & (entries.accepted_np >= 0)
        if settle is not None:
            known_np &= np.isin(entries.req_indices_np, settle)
        rest_np = others_np & ~known_np
        return (
            entries,
            found_np,
            entries.select(np.flatnonzero(known_np)),
            entries.select(np.flatnonzero(rest_np)),
        )

    def add(self, entries: Entries, query_start_loc_np: np.ndarray, num_rows: int) -> None:
        """Puts entries in the place of those taken.

        Args:
            entries: with `steps_np` -1 where they are of the step at hand.
            query_start_loc_np: that step's own array.
            num_rows: that it keeps.
        """
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
    """[count] int32, zeros where there is none."""
    return mx.zeros(count, mx.int32) if lag is None else lag


def _widened(tables_np: np.ndarray, width: int) -> np.ndarray:
    return np.pad(tables_np, ((0, 0), (0, width - tables_np.shape[1])))
