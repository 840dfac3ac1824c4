# SPDX-License-Identifier: Apache-2.0
"""Token counts for the penalties, kept on the device because the host does not know the tokens."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from vllm_metal.sample.draft_spans import DraftSpans
from vllm_metal.sample.state import Feature, Step
from vllm_metal.sample.transforms import penalise

_IN_PROMPT = 1
_ONE_OUTPUT = 2


class Penalties:
    """Occurrence table of the requests that use penalties.

    `_table` is int32 [capacity, V]: bit 0 says that the token is in the prompt, the rest counts
    its occurrences in the output. One word for both makes a step one gather and one scatter-add.
    Rows are handed out on demand and reused; capacity doubles.
    """

    def __init__(self, vocab_size: int, max_num_reqs: int) -> None:
        self._vocab_size = vocab_size
        self._table = mx.zeros((0, vocab_size), dtype=mx.int32)
        self._row_of_slot = np.zeros(max_num_reqs, dtype=np.int32)
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._unwritten: dict[int, np.ndarray] = {}

    def add(self, req_idx: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Counts the tokens known so far; they reach the device with the req_idx's next step."""
        row = self._free.pop() if self._free else len(self._rows)
        self._rows[req_idx] = row
        self._row_of_slot[req_idx] = row
        counts = _ONE_OUTPUT * _bincount(output, self._vocab_size)
        counts[_bincount(prompt, self._vocab_size) > 0] += _IN_PROMPT
        self._unwritten[row] = counts

    def remove(self, req_idx: int) -> None:
        row = self._rows.pop(req_idx, None)
        if row is not None:
            self._unwritten.pop(row, None)
            self._free.append(row)

    def apply(self, logits: mx.array, step: Step) -> mx.array:
        """float32 [N, V] -> float32 [N, V]. Rows without penalties have neutral parameters, so it
        does not matter which table row they are given."""
        self._write()
        rows = np.where(
            step.rows["features"] & np.uint32(Feature.PENALTIES),
            self._row_of_slot[step.req_indices],
            0,
        )
        table = self._table[mx.array(rows)]
        if step.draft_spans is not None:
            table = _count_drafts(table, step.draft_spans)
        repetition, frequency, presence = (
            mx.array(step.column(name)) for name in ("repetition", "frequency", "presence")
        )
        counts = mx.right_shift(table, 1)
        return penalise(logits, table > 0, counts, repetition, frequency, presence)

    def record(self, token_ids: mx.array, step: Step, accepted: mx.array | None) -> None:
        """Counts the tokens just sampled, int32 [N], without looking at them.

        accepted: int32 [R], drafts of each span that were; None without draft_spans.
        """
        count: int | mx.array = _ONE_OUTPUT
        if step.draft_spans is not None and accepted is not None:
            count = _ONE_OUTPUT * step.draft_spans.kept(accepted).astype(mx.int32)
        rows = step.rows_using(Feature.PENALTIES)
        if len(rows) < len(step.req_indices):
            index = mx.array(rows)
            token_ids = token_ids[index]
            count = count[index] if isinstance(count, mx.array) else count
        table_rows = mx.array(self._row_of_slot[step.req_indices[rows]])
        self._table = self._table.at[table_rows, token_ids].add(count)

    def _write(self) -> None:
        if not self._unwritten:
            return
        rows = np.fromiter(self._unwritten, dtype=np.int32)
        capacity = self._table.shape[0]
        if (needed := int(rows.max()) + 1) > capacity:
            most = len(self._row_of_slot)  # requests
            grown = min(max(needed, 2 * capacity), most) - capacity
            extra = mx.zeros((grown, self._vocab_size), dtype=mx.int32)
            self._table = mx.concatenate([self._table, extra])
        self._table[mx.array(rows)] = mx.array(np.stack(list(self._unwritten.values())))
        self._unwritten.clear()


def _count_drafts(table: mx.array, draft_spans: DraftSpans) -> mx.array:
    """int32 [N, V], occurrences as each row would find them, were the drafts before it output."""
    later, earlier = draft_spans.earlier_np
    if len(later) == 0:
        return table
    # What follows a draft outside the vocabulary is discarded: it may count as any token.
    drafts = mx.clip(draft_spans.draft_ids, 0, table.shape[1] - 1)
    return table.at[mx.array(later), drafts[mx.array(earlier)]].add(_ONE_OUTPUT)


def _bincount(token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    ids = np.asarray(token_ids, dtype=np.int64)
    # Prompts may hold placeholder ids beyond the vocabulary (multi-modal inputs).
    ids = ids[(ids >= 0) & (ids < vocab_size)]
    return np.bincount(ids, minlength=vocab_size).astype(np.int32)
