# SPDX-License-Identifier: Apache-2.0
"""Drafts of a step with memory reserved for a part of them."""

from types import SimpleNamespace

import numpy as np
from engine.batch.test_requests import new_request
from hypothesis import given
from hypothesis import strategies as st

from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.spec_decode.adaptive import AdaptiveDraftLengths, DraftLengths
from vllm_metal.engine.spec_decode.proposer import Drafts, Proposer
from vllm_metal.engine.spec_decode.speculator import Speculator
from vllm_metal.engine.spec_decode.suffix import SuffixOptions, SuffixProposer

K, MAX_LEN = 4, 16


class Known(dict):
    """Requests by id, with 3 tokens each that the host knows."""

    have_unread_np = Requests.have_unread_np

    def __init__(self, count):
        super().__init__({f"r{index}": SimpleNamespace(req_idx=index) for index in range(count)})
        self.token_ids_np = np.ones((count, MAX_LEN), np.int32)
        self.num_known_np = np.full(count, 3, np.int32)
        self.num_tokens_np = self.num_known_before_np = self.num_known_np
        self.num_computed_tokens_np = np.full(count, 2, np.int32)


class Counting(Proposer):
    """Drafts 10, 11 and so on, as many as requested."""

    def propose(self, request):
        return Drafts.of_lists([list(range(10, 10 + limit)) for limit in request.limits_np], K)


def in_turns(wanted, most):
    """Returns the number of drafts of each request, if they are assigned in turn."""
    counts = [0] * len(wanted)
    for turn in range(K):
        for index, count in enumerate(wanted):
            if turn < count and (most is None or sum(counts) < most):
                counts[index] += 1
    return counts


@given(
    st.lists(st.tuples(st.integers(0, K), st.booleans()), min_size=1, max_size=6),
    st.none() | st.integers(0, 30),
)
def test_no_step_has_more_drafts_than_memory_is_set_aside_for(reserved, most):
    """Some are still to be proposed, and the scheduler knows others."""
    requests = Known(len(reserved))
    speculator = Speculator(requests, Counting(), DraftLengths(K), K, most)
    known = {
        name: [-1] * count if awaiting else list(range(20, 20 + count))
        for name, (count, awaiting) in zip(requests, reserved, strict=True)
    }
    rows = {name: 1 + len(drafts) for name, drafts in known.items()}
    for each in (speculator, speculator.for_warm_up()):
        found = each.step_drafts(rows, known)
        counts, wanted = found.counts_np.tolist(), [count for count, _ in reserved]
        assert all(np.array(counts) <= wanted)
        assert found.reserved_np.tolist() == wanted
        assert sum(counts) <= (sum(wanted) if most is None else most)
        kinds = {awaiting for count, awaiting in reserved if count}
        if len(kinds) == 1:  # of both together, some are given out twice
            assert counts == in_turns(wanted, most)
        if most is None:
            assert counts == wanted
        for drafts, count, (_, awaiting) in zip(
            np.array(found.token_ids), counts, reserved, strict=True
        ):
            first = 10 if awaiting else 20
            assert drafts[:count].tolist() == list(range(first, first + count))


def test_drafts_for_the_scheduler_are_within_it_too():
    requests = Known(3)
    speculator = Speculator(requests, Counting(), DraftLengths(K), K, 5)
    batch = SimpleNamespace(
        requests=[SimpleNamespace(req_id=name) for name in requests],
        sampling_np=np.arange(3),
        query_start_loc_np=np.arange(4, dtype=np.int32),
    )
    found = speculator.drafts_after(batch)
    assert found == {"r0": [10, 11], "r1": [10, 11], "r2": [10]}


def test_another_request_in_a_request_index_starts_afresh():
    lengths, both = AdaptiveDraftLengths(K, 2), np.array([0, 1])
    speculator = Speculator(Known(2), Counting(), lengths, K)
    for _ in range(50):
        lengths.observe_drafts(both, np.array([K, K]), np.array([0, K]))
    unpredictable, predictable = lengths.limits(both, 0)
    for req_idx in both:
        speculator.leave(int(req_idx))
    first, second = lengths.limits(both, 0)
    assert unpredictable < first == second <= predictable


def test_past_outputs_are_drafts_for_requests_of_the_same_salt():
    requests = Requests(2, 64, BlockTables(1, 2, 5))
    speculator = Speculator(requests, SuffixProposer(K, SuffixOptions()), DraftLengths(K), K)

    def drafts(salt, prompt, output=()):
        """Returns the drafts of a request's last step."""
        data = new_request("r", prompt, ([1],), len(prompt) - 1)
        data.cache_salt = salt
        state = requests.add_request(data)
        speculator.enter(state)
        for token in [*output, None]:
            found = speculator.step_drafts({"r": 1 + K}, {"r": [-1] * K})
            if token is not None:
                requests.note_sampled(np.array([state.req_idx]))
                requests.append_tokens(state, [token])
        requests.remove_request("r")
        speculator.leave(state.req_idx)
        return np.array(found.token_ids)[0, : found.counts_np[0]].tolist()

    output = list(range(10, 30))
    drafts("tenant", [1], output)
    for salt, expected in ((None, []), ("other", []), ("tenant", output[4:8])):
        assert drafts(salt, output[:4]) == expected
