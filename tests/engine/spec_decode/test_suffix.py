# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal.engine.spec_decode.proposer import DraftRequest
from vllm_metal.engine.spec_decode.suffix import SuffixOptions, SuffixProposer

MAX_LEN = 64


def guess(proposer, text, req_idx=0, limit=8):
    table = np.full((req_idx + 1, MAX_LEN), 999, np.int32)
    table[req_idx, : len(text)] = text
    drafts = proposer.propose(
        DraftRequest(table, np.array([req_idx]), np.array([len(text)]), np.array([limit]))
    )
    return np.array(drafts.token_ids)[0, : drafts.counts_np[0]].tolist()


def run_to_end(proposer, prompt, output, req_idx=0):
    """Runs a whole request, one token a step."""
    for end in range(len(output) + 1):
        guess(proposer, prompt + output[:end], req_idx)
    proposer.forget_request(req_idx)


def counted_path(text, places, num_tokens, min_prob):
    """Returns the greedy path by counts after `places`, and its expected length."""
    path, score, prob, total = [], 0.0, 1.0, len(places) + 1
    while len(path) < num_tokens:
        follow = [text[p + len(path)] if p + len(path) < len(text) else None for p in places]
        counts = {token: follow.count(token) for token in follow}
        most = max(counts.values())
        token = [token for token in follow if counts[token] == most][-1]
        prob *= most / total
        if token is None or prob < min_prob:
            break
        places = [p for p, t in zip(places, follow, strict=True) if t == token]
        path.append(token)
        score, total = score + prob, most
    return score, path


def all_paths(text, options, limit):
    """Returns one path per match length, by definition."""
    for size in (4, 2):
        places = [e for e in range(size, len(text)) if text[e - size : e] == text[-size:]]
        if places and len(text) >= size:
            break
    paths = [(0.0, [])]
    for match in range(1, options.max_tree_depth):
        matching = [e for e in places if e >= match and text[e - match : e] == text[-match:]]
        if not matching:
            break
        budget = int(match * options.max_spec_factor + 1e-6)
        budget = min(limit, budget, options.max_tree_depth - match)
        paths.append(counted_path(text, matching, budget, options.min_token_prob))
    return paths


@settings(max_examples=300)
@given(
    st.integers(1, 3).flatmap(
        lambda kinds: st.lists(st.integers(0, kinds), min_size=1, max_size=48)
    ),
    st.builds(
        SuffixOptions,
        max_tree_depth=st.integers(1, 16),
        max_spec_factor=st.sampled_from([0.5, 1.0, 2.0]),
        min_token_prob=st.sampled_from([0.0, 0.1, 0.5]),
    ),
    st.integers(1, 47),
)
def test_takes_the_path_of_highest_expected_length(text, options, first_seen):
    proposer = SuffixProposer(8, options)
    guess(proposer, text[:first_seen])
    paths = all_paths(text, options, 8)
    best = max(score for score, _ in paths)
    assert guess(proposer, text) in [path for score, path in paths if score > best - 1e-9]


def test_past_outputs_continue_a_new_request():
    proposer = SuffixProposer(8, SuffixOptions())
    run_to_end(proposer, [1, 2, 3], list(range(10, 30)))
    assert guess(proposer, [5, 12, 13, 14, 15], req_idx=3) == [16, 17, 18, 19]


def test_prompts_are_not_shared():
    proposer = SuffixProposer(8, SuffixOptions())
    run_to_end(proposer, list(range(10, 30)), [1, 2, 3])
    assert guess(proposer, [5, 12, 13, 14, 15], req_idx=3) == []


def test_past_outputs_stay_in_their_scope():
    proposer = SuffixProposer(8, SuffixOptions())
    proposer.set_scope(0, "tenant")
    run_to_end(proposer, [1], list(range(10, 30)))
    for scope, expected in ((None, []), ("other", []), ("tenant", [14, 15, 16, 17])):
        proposer.set_scope(1, scope)
        assert guess(proposer, [10, 11, 12, 13], req_idx=1) == expected
        proposer.forget_request(1)


@pytest.mark.parametrize(
    ("options", "max_tokens", "kept"),
    [
        (SuffixOptions(max_cached_requests=0), 1000, []),
        (SuffixOptions(max_cached_requests=2), 1000, [1, 2]),
        (SuffixOptions(), 25, [1, 2]),
        (SuffixOptions(), 10, [2]),
        (SuffixOptions(), 9, []),
    ],
)
def test_oldest_outputs_are_dropped_across_scopes(options, max_tokens, kept):
    proposer = SuffixProposer(8, options, max_tokens)
    outputs = [list(range(start, start + 10)) for start in (100, 200, 300)]
    for number, output in enumerate(outputs):
        proposer.set_scope(0, str(number % 2))
        run_to_end(proposer, [1], output)
    for number, output in enumerate(outputs):
        proposer.set_scope(1, str(number % 2))
        for start in (0, 4, 6):  # the start of the output, and towards its end
            text, follow = output[start : start + 4], output[start + 4 : start + 8]
            assert guess(proposer, text, req_idx=1) == (follow if number in kept else [])
        proposer.forget_request(1)


def test_only_the_newest_places_of_a_frequent_ngram_count():
    """All places are followed by 1 more often, but the latest by 2."""
    text = [9, 9, 7, 8, 1] * 66 + [9, 9, 7, 8, 2] * 62 + [9, 9, 7, 8]
    table = np.zeros((1, 1024), np.int32)
    table[0, : len(text)] = text
    proposer = SuffixProposer(3, SuffixOptions(max_tree_depth=5, max_spec_factor=0.5))
    drafts = proposer.propose(
        DraftRequest(table, np.array([0]), np.array([len(text)]), np.array([1]))
    )
    assert np.array(drafts.token_ids)[0, : drafts.counts_np[0]].tolist() == [2]


def test_a_text_that_changed_hands_is_no_output():
    proposer = SuffixProposer(8, SuffixOptions())
    guess(proposer, [1, 2, 3])
    guess(proposer, [1, 2, 3, 4, 5])
    guess(proposer, list(range(40, 50)))  # without a word of the first one's end
    proposer.forget_request(0)
    assert guess(proposer, [3, 4], req_idx=1) == guess(proposer, [43, 44], req_idx=2) == []
