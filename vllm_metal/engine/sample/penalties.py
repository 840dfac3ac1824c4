# SPDX-License-Identifier: Apache-2.0
"""Implements penalties; counts stay on the device because the host lacks the newest tokens."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from vllm import SamplingParams

from vllm_metal.engine.sample.draft_spans import DraftSpans
from vllm_metal.engine.sample.stage import SamplingStage, Step
from vllm_metal.engine.sample.transforms import penalise

_IN_PROMPT = 1
_ONE_OUTPUT = 2


class Penalties(SamplingStage):
    """Applies repetition_penalty, frequency_penalty and presence_penalty."""

    def __init__(self, vocab_size: int, max_num_reqs: int) -> None:
        self._vocab_size = vocab_size
        self._repetition = np.ones(max_num_reqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_reqs, dtype=np.float32)
        self._presence = np.zeros(max_num_reqs, dtype=np.float32)
        # int32 [capacity, V]: bit 0 is set if the token is in the prompt, the other bits count its
        # occurrences in the output. One word for both makes a step one gather and one scatter-add.
        # A request with penalties owns a row; the capacity doubles when no row is free.
        self._table = mx.zeros((0, vocab_size), dtype=mx.int32)
        self._table_row = np.zeros(max_num_reqs, dtype=np.int32)  # by req_idx; 0 where it has none
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._unwritten: dict[int, np.ndarray] = {}

    def add_request(
        self, req_idx: int, params: SamplingParams, prompt: Sequence[int], output: list[int]
    ) -> bool:
        """Counts the request's tokens so far; its next step writes the counts to the device."""
        if not (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        ):
            return False
        self._repetition[req_idx] = params.repetition_penalty
        self._frequency[req_idx] = params.frequency_penalty
        self._presence[req_idx] = params.presence_penalty
        row = self._free.pop() if self._free else len(self._rows)
        self._rows[req_idx] = row
        self._table_row[req_idx] = row
        counts = _ONE_OUTPUT * _bincount(output, self._vocab_size)
        counts[_bincount(prompt, self._vocab_size) > 0] += _IN_PROMPT
        self._unwritten[row] = counts
        return True

    def remove_request(self, req_idx: int) -> None:
        row = self._rows.pop(req_idx, None)
        if row is None:
            return
        self._repetition[req_idx] = 1.0
        self._frequency[req_idx] = 0.0
        self._presence[req_idx] = 0.0
        self._table_row[req_idx] = 0
        self._unwritten.pop(row, None)
        self._free.append(row)

    def heaviest(self) -> dict[str, Any]:
        return {"repetition_penalty": 1.1, "presence_penalty": 0.1}

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        self._write()
        # Rows without penalties have neutral parameters, so any row of the table does for them.
        table = self._table[mx.array(self._table_row[step.req_indices])]
        if step.draft_spans is not None:
            table = _count_drafts(table, step.draft_spans)
        repetition, frequency, presence = (
            mx.array(step.column(column))
            for column in (self._repetition, self._frequency, self._presence)
        )
        counts = mx.right_shift(table, 1)
        return penalise(logits, table > 0, counts, repetition, frequency, presence)

    def record(self, token_ids: mx.array, step: Step, accepted: mx.array | None) -> None:
        count: int | mx.array = _ONE_OUTPUT
        if step.draft_spans is not None and accepted is not None:
            count = _ONE_OUTPUT * step.draft_spans.is_output(accepted).astype(mx.int32)
        rows = step.rows_using(self)
        if len(rows) < len(step.req_indices):
            index = mx.array(rows)
            token_ids = token_ids[index]
            count = count[index] if isinstance(count, mx.array) else count
        table_rows = mx.array(self._table_row[step.req_indices[rows]])
        self._table = self._table.at[table_rows, token_ids].add(count)

    def _write(self) -> None:
        if not self._unwritten:
            # Grow by doubling, at most to a row per request.
            return
        rows = np.fromiter(self._unwritten, dtype=np.int32)
        capacity = self._table.shape[0]
        if (needed := int(rows.max()) + 1) > capacity:
            most = len(self._table_row)  # requests
            grown = min(max(needed, 2 * capacity), most) - capacity
            extra = mx.zeros((grown, self._vocab_size), dtype=mx.int32)
            self._table = mx.concatenate([self._table, extra])
        self._table[mx.array(rows)] = mx.array(np.stack(list(self._unwritten.values())))
        self._unwritten.clear()


def _count_drafts(table: mx.array, draft_spans: DraftSpans) -> mx.array:
    """Adds the drafts before each row in its span to the table's output counts, int32 [N, V]."""
    later, earlier = draft_spans.earlier_np
    if len(later) == 0:
        return table
    # A draft outside the vocabulary is never accepted and the rows after it are discarded, so it
    # may count as any token.
    drafts = mx.clip(draft_spans.draft_ids, 0, table.shape[1] - 1)
    return table.at[mx.array(later), drafts[mx.array(earlier)]].add(_ONE_OUTPUT)


def _bincount(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    ids = np.asarray(token_ids, dtype=np.int64)
    # Prompts may hold placeholder ids beyond the vocabulary (multi-modal inputs).
    ids = ids[(ids >= 0) & (ids < vocab_size)]
    return np.bincount(ids, minlength=vocab_size).astype(np.int32)
