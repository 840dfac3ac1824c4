# SPDX-License-Identifier: Apache-2.0
"""Splits a step's rows into chunks, so that the memory of their logits is bounded."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vllm_metal.engine.sample.draft_spans import DraftSpans

#: Logits computed at once. The stages hold several copies of them in float32, 32 MiB each.
#: A vocabulary of 150,000 tokens makes that 55 rows, enough to keep a GPU busy.
LOGITS_AT_ONCE = 2**23


def rows_at_once(vocab_size: int) -> int:
    """Returns the most rows to sample at once; a longer span still forms one chunk."""
    return max(LOGITS_AT_ONCE // vocab_size, 1)


def logit_chunks(
    num_rows: int, draft_spans: DraftSpans | None, most: int
) -> Iterator[tuple[slice, DraftSpans | None]]:
    """Yields the rows and spans of each chunk: at most `most` rows, or a single span."""
    lens = np.ones(num_rows, np.int32) if draft_spans is None else draft_spans.lens_np
    ends = np.cumsum(lens)
    first = 0
    while first < len(lens):
        start = int(ends[first] - lens[first])
        last = max(int(np.searchsorted(ends, start + most, side="right")), first + 1)
        rows = slice(start, int(ends[last - 1]))
        yield rows, None if draft_spans is None else draft_spans.part(first, last)
        first = last
