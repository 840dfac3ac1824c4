# SPDX-License-Identifier: Apache-2.0
"""A step's rows in chunks, so that what sampling needs does not grow with the rows of a step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vllm_metal.sample.draft_spans import DraftSpans

#: Logits that are sampled from at once. The transforms hold several copies of them in float32,
#: 32 MiB each: at 150,000 tokens of vocabulary that is 55 rows, enough to keep a GPU busy.
LOGITS_AT_ONCE = 2**23


def rows_at_once(vocab_size: int) -> int:
    """Rows that are sampled from at once; a span is never divided, whatever its length."""
    return max(LOGITS_AT_ONCE // vocab_size, 1)


def logit_chunks(
    num_rows: int, draft_spans: DraftSpans | None, most: int
) -> Iterator[tuple[slice, DraftSpans | None]]:
    """Rows of chunks that have at most `most` of them, or a single span; and their draft_spans."""
    lens = np.ones(num_rows, np.int32) if draft_spans is None else draft_spans.lens_np
    ends = np.cumsum(lens)
    first = 0
    while first < len(lens):
        start = int(ends[first] - lens[first])
        last = max(int(np.searchsorted(ends, start + most, side="right")), first + 1)
        rows = slice(start, int(ends[last - 1]))
        yield rows, None if draft_spans is None else draft_spans.part(first, last)
        first = last
