# SPDX-License-Identifier: Apache-2.0
import mlx.core as mx
import numpy as np
from engine.batch.test_requests import new_request
from vllm.v1.core.sched.output import GrammarOutput

from vllm_metal.engine.batch.grammar import match_grammar_mask
from vllm_metal.engine.batch.input_batch import StepDrafts, prepare
from vllm_metal.engine.batch.requests import BlockTables, Requests


def test_masks_find_their_rows_and_no_draft_is_kept_behind_an_unsound_one():
    """The scheduler knows fewer drafts for the second grammar's request."""
    requests = Requests(3, 64, BlockTables(1, 3, 5))
    for index, name in enumerate("abc"):
        requests.add_request(new_request(name, [1, 2, 3], ([index],), 2))
    ids = mx.array([[10, 11], [20, 21], [30, 31]], mx.int32)
    counts = np.full(3, 2, np.int32)
    drafts = StepDrafts(ids, counts, counts)
    batch = prepare(requests, dict.fromkeys("abc", 3), mx.zeros(3, mx.int32), drafts)
    output = GrammarOutput(["c", "a"], np.arange(6, dtype=np.int32)[:, None])
    output.num_acceptable_drafts = [2, 1]
    mask, batch = match_grammar_mask(batch, output)
    found = dict(zip(mask.rows.tolist(), np.array(mask.bitmask)[:, 0].tolist(), strict=True))
    assert found == {6: 0, 7: 1, 8: 2, 0: 3, 1: 4, 2: 5}
    assert batch.draft_spans.draft_ids.tolist() == [10, -1, -1, 20, 21, -1, 30, 31, -1]
