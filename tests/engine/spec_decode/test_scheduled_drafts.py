# SPDX-License-Identifier: Apache-2.0
"""A rank that does not sample lays out the scheduler's drafts and finds the kept ones."""

import numpy as np
from engine.batch.test_requests import new_request, word
from vllm.v1.core.sched.output import CachedRequestData

from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.spec_decode.scheduled_drafts import ScheduledDrafts


def test_drafts_are_those_that_the_scheduler_sent():
    requests = Requests(3, 64, BlockTables(1, 3, 5))
    for name in "abc":
        requests.add_request(new_request(name, [5, 6, 7], ([1],), num_computed_tokens=2))
    speculator = ScheduledDrafts(requests, num_drafts=3, most_drafts=None)
    drafts = speculator.step_drafts({"b": 3, "a": 1, "c": 4}, {"b": [8, 9], "c": [4, 3, 2]})
    assert drafts.counts_np.tolist() == drafts.reserved_np.tolist() == [2, 0, 3]
    found = np.array(drafts.token_ids)
    assert found[0, :2].tolist() == [8, 9] and found[2].tolist() == [4, 3, 2]
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.new_block_ids = ["b", "c"], [None, None]
    cached.num_computed_tokens, cached.new_token_ids = [4, 6], [[1], [1]]
    requests.apply(word(scheduled_cached_reqs=cached))
    assert requests["b"].output_token_ids == [8, 1]
    assert requests["c"].output_token_ids == [4, 3, 2, 1]


def test_no_more_are_laid_out_than_every_rank_has_memory_for():
    requests = Requests(2, 64, BlockTables(1, 2, 5))
    for name in "ab":
        requests.add_request(new_request(name, [5, 6, 7], ([1],), num_computed_tokens=2))
    speculator = ScheduledDrafts(requests, num_drafts=3, most_drafts=3)
    drafts = speculator.step_drafts({"a": 4, "b": 4}, {"a": [8, 9, 1], "b": [4, 3, 2]})
    assert drafts.counts_np.tolist() == [2, 1] and drafts.reserved_np.tolist() == [3, 3]
