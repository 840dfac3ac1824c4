# SPDX-License-Identifier: Apache-2.0
"""The persistent tables across a request's life."""

from dataclasses import replace

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_metal.engine.batch.requests import BlockTables, Changes, Requests


def new_request(req_id, prompt, block_ids, num_computed_tokens=0):
    return NewRequestData(
        req_id=req_id,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=SamplingParams(),
        pooling_params=None,
        block_ids=block_ids,
        num_computed_tokens=num_computed_tokens,
        lora_request=None,
    )


def word(**told):
    """Returns scheduler output with only `told` set."""
    return replace(SchedulerOutput.make_empty(), **told)


def make():
    return Requests(2, 64, BlockTables(2, 2, 5))


def test_a_request_is_added_advanced_and_removed():
    requests = make()
    state = requests.add_request(new_request("a", [5, 6, 7], ([3], [9])))
    req_idx = state.req_idx
    assert requests.token_ids_np[req_idx, :3].tolist() == [5, 6, 7]
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.new_block_ids, cached.num_computed_tokens = ["a"], [([4], [8])], [3]
    assert requests.apply(word(scheduled_cached_reqs=cached)) == Changes()
    assert requests.num_computed_tokens_np[req_idx] == 3
    tables = [table[req_idx, :2].tolist() for table in requests.block_tables.tables_np]
    assert tables == [[3, 4], [9, 8]]
    assert requests.remove_request("a") is state
    assert requests.remove_request("a") is None
    assert len(requests) == 0


def test_learned_tokens_extend_what_the_host_knows():
    requests = make()
    state = requests.add_request(new_request("a", [5, 6], ([1], [2])))
    outputs = state.output_token_ids
    requests.append_tokens(state, [11])
    requests.append_tokens(state, [12])
    assert outputs == [11, 12]
    assert requests.num_known_np[state.req_idx] == 4
    assert requests.token_ids_np[state.req_idx, :4].tolist() == [5, 6, 11, 12]


def test_a_token_learned_after_resume_or_removal_goes_nowhere():
    requests = make()
    old = requests.add_request(new_request("a", [5, 6], ([1], [2])))
    assert requests.preempt_request("a") is old
    new = requests.resume_request("a", [5, 6, 11], ([3], [4]), num_computed_tokens=0)
    requests.append_tokens(old, [99])
    assert new.output_token_ids == [11]
    assert requests.num_known_np[new.req_idx] == 3
    assert requests.block_tables.tables_np[0][new.req_idx, 0] == 3
    requests.remove_request("a")
    other = requests.add_request(new_request("b", [1], ([5], [6])))
    requests.append_tokens(new, [99])
    assert other.req_idx == new.req_idx and requests.num_known_np[other.req_idx] == 1


def test_a_rank_that_does_not_sample_learns_of_the_scheduler_what_others_did():
    """Tokens behind those that are computed; before them, drafts of the step before that were
    kept."""
    requests = make()
    state = requests.add_request(new_request("a", [5, 6], ([1], [2])))

    def told(num_computed, news):
        cached = CachedRequestData.make_empty()
        cached.req_ids, cached.new_block_ids = ["a"], [None]
        cached.num_computed_tokens, cached.new_token_ids = [num_computed], [news]
        requests.apply(word(scheduled_cached_reqs=cached))
        known = int(requests.num_known_np[state.req_idx])
        assert requests.num_tokens_np[state.req_idx] == known
        return requests.token_ids_np[state.req_idx, :known].tolist()

    assert told(2, [11]) == [5, 6, 11]
    requests.note_drafts(state.req_idx, [12, 13, 14])
    assert told(5, [15]) == [5, 6, 11, 12, 13, 15]  # two of them were kept
    requests.note_drafts(state.req_idx, [16])
    assert told(6, [17]) == [5, 6, 11, 12, 13, 15, 17]  # none was
    assert state.output_token_ids == [11, 12, 13, 15, 17]


def test_drafts_beyond_the_longest_text_are_left_out():
    requests = make()
    state = requests.add_request(new_request("a", [5] * 63, ([1], [2])))
    requests.note_drafts(state.req_idx, [6, 7, 8])
    assert requests.token_ids_np[state.req_idx, 62:].tolist() == [5, 6]


def test_request_indices_are_given_again():
    requests = make()
    for name in ("a", "b"):
        requests.add_request(new_request(name, [1], ([1], [1])))
    requests.remove_request("a")
    requests.add_request(new_request("c", [2, 3], ([7], [8])))
    req_indices = sorted(state.req_idx for state in requests)
    assert req_indices == [0, 1]
    assert np.count_nonzero(requests.num_tokens_np == 2) == 1


def test_a_preempted_request_leaves_its_request_index_to_others():
    requests = make()
    preempted = requests.add_request(new_request("a", [5, 6], ([1], [1])))
    requests.append_tokens(preempted, [7])
    assert requests.preempt_request("a") is preempted
    assert requests.preempt_request("a") is None and "a" not in requests
    others = [requests.add_request(new_request(name, [1], ([2], [2]))) for name in ("b", "c")]
    assert sorted(state.req_idx for state in others) == [0, 1]
    assert requests.remove_request("b") is others[0]
    resumed = requests.resume_request("a", [5, 6, 7], ([3], [3]), num_computed_tokens=0)
    assert resumed.req_idx == others[0].req_idx and resumed.output_token_ids == [7]
    assert requests.token_ids_np[resumed.req_idx, :3].tolist() == [5, 6, 7]


def test_a_preempted_request_may_be_aborted():
    requests = make()
    requests.add_request(new_request("a", [5, 6], ([1], [1])))
    requests.preempt_request("a")
    assert requests.remove_request("a") is None
    assert len(requests) == 0
    assert {requests.add_request(new_request(name, [1], ([2], [2]))).req_idx for name in "bc"} == {
        0,
        1,
    }


def test_one_word_of_the_scheduler_tells_who_left_and_who_entered():
    requests = make()
    ended = requests.add_request(new_request("ended", [1], ([1], [1])))
    pushed_out = requests.add_request(new_request("pushed out", [2, 3], ([2], [2])))
    new = [new_request(name, [4, 5, 6], ([3], [3]), 2) for name in ("first", "second")]
    finished = {"ended", "never scheduled"}
    told = word(finished_req_ids=finished, preempted_req_ids={"pushed out"}, scheduled_new_reqs=new)
    changes = requests.apply(told)
    entered = changes.entered
    assert changes.left == [ended, pushed_out] and not changes.failed
    assert [state.req_id for state in entered] == ["first", "second"]
    assert {state.req_idx for state in entered} == {ended.req_idx, pushed_out.req_idx}
    assert requests.num_computed_tokens_np.tolist() == [2, 2]

    back = CachedRequestData.make_empty()
    back.req_ids, back.resumed_req_ids, back.num_computed_tokens = (
        ["pushed out"],
        {"pushed out"},
        [1],
    )
    back.new_block_ids, back.all_token_ids = [([7], [8])], {"pushed out": [2, 3, 9]}
    changes = requests.apply(word(finished_req_ids={"first"}, scheduled_cached_reqs=back))
    (resumed,) = changes.entered
    assert [state.req_id for state in changes.left] == ["first"]
    assert resumed is not pushed_out and resumed.output_token_ids == [9]
    assert requests.num_computed_tokens_np[resumed.req_idx] == 1
    assert [table[resumed.req_idx, 0] for table in requests.block_tables.tables_np] == [7, 8]


def test_a_request_of_a_model_without_blocks_resumes():
    """Without cache groups, vLLM names no blocks."""
    requests = Requests(1, 64, BlockTables(0, 1, 5))
    requests.add_request(new_request("a", [1, 2], ()))
    requests.preempt_request("a")
    back = CachedRequestData.make_empty()
    back.req_ids, back.resumed_req_ids, back.num_computed_tokens = ["a"], {"a"}, [0]
    back.new_block_ids, back.all_token_ids = [None], {"a": [1, 2]}
    changes = requests.apply(word(scheduled_cached_reqs=back))
    assert not changes.failed and [state.prompt_token_ids for state in changes.entered] == [[1, 2]]


def test_by_the_second_contract_a_request_resumes_as_a_new_one():
    requests = make()
    old = requests.add_request(new_request("a", [5, 6], ([1], [2])))
    requests.append_tokens(old, [11, 12])
    assert requests.apply(word(preempted_req_ids={"a"})).left == [old]
    tokens = [5, 6, 11, 12, 13]  # the scheduler's own list; the last one came after the preemption
    back = replace(new_request("a", [5, 6], ([3], [4]), 3), prefill_token_ids=tokens)
    changes = requests.apply(word(scheduled_new_reqs=[back]))
    (new,) = changes.entered
    assert not changes.failed and not changes.left and requests.num_preempted == 0
    tokens.append(14)
    assert (new.prompt_token_ids, new.output_token_ids) == ([5, 6], [11, 12, 13])
    assert requests.token_ids_np[new.req_idx, :5].tolist() == [5, 6, 11, 12, 13]
    assert requests.num_known_np[new.req_idx] == 5
    assert requests.num_computed_tokens_np[new.req_idx] == 3
    assert requests.block_tables.tables_np[1][new.req_idx, 0] == 4


def next_turn(prompt, block_ids, num_computed_tokens):
    return word(scheduled_new_reqs=[new_request("session", prompt, block_ids, num_computed_tokens)])


@pytest.mark.parametrize("told_of_the_end", [True, False])
def test_the_next_turn_of_a_session_takes_the_place_of_the_one_before(told_of_the_end):
    requests, prompt = make(), [5, 6]  # vLLM's own list, which it lengthens
    (before,) = requests.apply(next_turn(prompt, ([1], [2]), 0)).entered
    requests.note_sampled(np.array([before.req_idx]))
    requests.append_tokens(before, [7])
    for number in range(4):  # more than there are rows
        requests.note_sampled(np.array([before.req_idx]))  # a step in flight when the turn ended
        left = [before]
        if told_of_the_end:
            assert requests.apply(word(preempted_req_ids={"session"})).left == left
            assert requests.num_preempted == 1
            left = []
        prompt.append(8 + number)
        changes = requests.apply(next_turn(prompt, ([1, 3], [2, 4]), len(prompt) - 1))
        (turn,) = changes.entered
        assert changes.left == left and not changes.failed
        requests.append_tokens(before, [99])  # its token comes late, and goes nowhere
        row = turn.req_idx
        assert turn.output_token_ids == [] and turn.prompt_token_ids == prompt
        assert before.prompt_token_ids == prompt[:-1]
        assert requests.num_known_np[row] == requests.num_tokens_np[row] == len(prompt)
        assert requests.num_prompt_tokens_np[row] == len(prompt)
        assert requests.num_computed_tokens_np[row] == len(prompt) - 1
        tables = [table[row, :3].tolist() for table in requests.block_tables.tables_np]
        assert tables == [[1, 3, 0], [2, 4, 0]]
        assert len(requests) == 1 and requests.num_preempted == 0
        before = turn
    requests.apply(word(finished_req_ids={"session"}))
    assert len(requests) == requests.num_preempted == 0


def test_a_request_that_cannot_be_taken_in_fails_alone():
    requests = make()
    kept = requests.add_request(new_request("kept", [5, 6], ([1], [1])))
    cached = CachedRequestData.make_empty()
    cached.req_ids, cached.num_computed_tokens = ["unknown", "kept"], [9, 2]
    cached.new_block_ids = [None, ([4], [4])]
    too_long = new_request("too long", [1] * 65, ([2], [2]))
    too_many_blocks = new_request("too many blocks", [1], (list(range(6)), [2]))
    new = [too_long, too_many_blocks, new_request("sound", [7], ([3], [3]))]
    changes = requests.apply(word(scheduled_new_reqs=new, scheduled_cached_reqs=cached))
    assert changes.failed.keys() == {"too long", "too many blocks", "unknown"}
    assert [state.req_id for state in changes.left] == ["too long", "too many blocks"]
    assert [state.req_id for state in changes.entered] == ["sound"]
    assert {state.req_id for state in requests} == {"kept", "sound"}
    assert requests.num_computed_tokens_np[kept.req_idx] == 2
    assert requests.block_tables.tables_np[0][kept.req_idx, :2].tolist() == [1, 4]
    rows = {state.req_idx for state in requests}
    requests.apply(word(finished_req_ids={"kept", "sound", "too long"}))
    again = requests.apply(
        word(scheduled_new_reqs=[new_request(name, [1], ([1], [1])) for name in "ab"])
    )
    assert {state.req_idx for state in again.entered} == rows == {0, 1}


def test_all_that_was_sampled_counts_until_it_is_known_what_is_kept():
    requests = make()
    state = requests.add_request(new_request("a", [5, 6], ([1], [2])))
    req_indices = np.array([state.req_idx])
    requests.note_sampled(req_indices, np.array([4]))  # three drafts among them
    requests.num_computed_tokens_np[state.req_idx] = 7  # the scheduler has reserved more rows
    requests.roll_back()
    assert requests.num_tokens_np[state.req_idx] == 6
    assert requests.num_computed_tokens_np[state.req_idx] == 5
    requests.note_sampled(req_indices, np.array([2]))  # by the next step
    requests.append_tokens(state, [11, 12], num_rejected=2)
    assert requests.num_known_np[state.req_idx] == 4
    assert requests.num_tokens_np[state.req_idx] == 6  # the two of the next step follow
    assert requests.num_known_before_np[state.req_idx] == 2
