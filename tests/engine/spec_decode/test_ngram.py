# SPDX-License-Identifier: Apache-2.0
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal.engine.spec_decode.ngram import NgramProposer
from vllm_metal.engine.spec_decode.proposer import DraftRequest

MAX_LEN = 64
MAX_SLOTS = 4


def lists(drafts):
    token_ids = np.array(drafts.token_ids)
    return [row[:count].tolist() for row, count in zip(token_ids, drafts.counts_np, strict=True)]


def naive(text, min_n, max_n, limit):
    """Follows the definition: longest n-gram first, first place first."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return text[start + n :][:limit]
    return []


@pytest.fixture(scope="module")
def vllm_ngram():
    """vLLM's own proposer; the drafts it gives for one text. Its loops run as Python where numba,
    which compiles them and nothing else needs, is not installed. Other tests see neither."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("numba") is None:
            stand_in_for_numba(patch)
        yield proposers_of_vllm()


def stand_in_for_numba(patch):
    numba = ModuleType("numba")
    numba.jit = numba.njit = lambda *_, **__: lambda function: function
    numba.prange, numba.get_num_threads = range, lambda: 1
    numba.set_num_threads = lambda count: None
    patch.setitem(sys.modules, "numba", numba)
    patch.delitem(sys.modules, "vllm.v1.spec_decode.ngram_proposer", raising=False)


def proposers_of_vllm():
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer as Theirs

    proposers = {}

    def propose(text, min_n, max_n, num_drafts):
        key = (min_n, max_n, num_drafts)
        if key not in proposers:
            config = SimpleNamespace(
                speculative_config=SimpleNamespace(
                    prompt_lookup_min=min_n,
                    prompt_lookup_max=max_n,
                    num_speculative_tokens=num_drafts,
                ),
                model_config=SimpleNamespace(max_model_len=MAX_LEN),
                scheduler_config=SimpleNamespace(max_num_seqs=1024),
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
            )
            proposers[key] = Theirs(config)
        row = np.zeros((1, MAX_LEN), np.int32)
        row[0, : len(text)] = text
        lengths = np.array([len(text)], np.int32)
        return proposers[key].propose(num_drafts, [[text[-1]]], lengths, row)[0]

    return propose


few_tokens = st.integers(1, 4).flatmap(
    lambda kinds: st.lists(st.integers(0, kinds), min_size=1, max_size=MAX_LEN)
)


@settings(max_examples=200)
@given(few_tokens, st.sampled_from([(1, 1), (2, 2), (5, 5), (1, 4), (2, 5), (3, 8)]))
def test_agrees_with_vllm_token_for_token(vllm_ngram, text, lengths):
    table = np.zeros((1, MAX_LEN), np.int32)
    table[0, : len(text)] = text
    ours = NgramProposer(*lengths, num_drafts=4)
    drafts = ours.propose(DraftRequest(table, np.array([0]), np.array([len(text)]), np.array([4])))
    assert lists(drafts) == [vllm_ngram(text, *lengths, 4)]


@given(st.data())
def test_index_kept_over_steps_finds_what_a_fresh_look_does(data):
    """Texts grow by several tokens a step, in rows that change requests."""
    min_n = data.draw(st.integers(1, 3))
    max_n = data.draw(st.integers(min_n, 5))
    proposer = NgramProposer(min_n, max_n, num_drafts=3)
    table = np.zeros((MAX_SLOTS, MAX_LEN), np.int32)
    texts = {req_idx: [] for req_idx in range(MAX_SLOTS)}
    for _ in range(8):
        req_indices = data.draw(
            st.lists(st.sampled_from(range(MAX_SLOTS)), unique=True, min_size=1)
        )
        for req_idx in req_indices:
            if data.draw(st.integers(0, 9)) == 0:
                proposer.forget_request(req_idx)
                texts[req_idx] = []
            texts[req_idx] += data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
            table[req_idx] = 7
            table[req_idx, : len(texts[req_idx])] = texts[req_idx]
        limits = [data.draw(st.integers(0, 3)) for _ in req_indices]
        lengths = [len(texts[req_idx]) for req_idx in req_indices]
        drafts = proposer.propose(
            DraftRequest(table, np.array(req_indices), np.array(lengths), np.array(limits))
        )
        expected = [
            naive(texts[req_idx], min_n, max_n, limit)
            for req_idx, limit in zip(req_indices, limits, strict=True)
        ]
        assert lists(drafts) == expected


@pytest.mark.parametrize("num_tokens", [3, 20])
def test_request_index_taken_over_unannounced(num_tokens):
    """A text that is shorter, or differs where the old one ended, starts a new index."""
    table = np.zeros((1, MAX_LEN), np.int32)
    table[0, :10] = np.arange(10)
    proposer = NgramProposer(1, 2, num_drafts=2)
    proposer.propose(DraftRequest(table, np.array([0]), np.array([10]), np.array([2])))
    text = [5, 6, 5] if num_tokens == 3 else [*range(30, 49), 30]
    table[0, :num_tokens] = text
    drafts = proposer.propose(
        DraftRequest(table, np.array([0]), np.array([num_tokens]), np.array([2]))
    )
    assert lists(drafts) == [text[1:3]]


def test_forgotten_text_is_not_found_again():
    """Another text of the same length and ending differs only by `forget`."""
    table = np.zeros((1, MAX_LEN), np.int32)
    proposer = NgramProposer(1, 1, num_drafts=1)
    for first in (3, 4):
        table[0, :12] = [first, 5, *range(20, 28), 6, 3]
        drafts = proposer.propose(DraftRequest(table, np.array([0]), np.array([12]), np.array([1])))
        assert lists(drafts) == [[5] if first == 3 else []]
        proposer.forget_request(0)


def test_no_draft_beyond_the_longest_text():
    table = np.ones((1, 8), np.int32)
    proposer = NgramProposer(1, 1, num_drafts=4)
    counts = [
        proposer.propose(
            DraftRequest(table, np.array([0]), np.array([n]), np.array([4]))
        ).counts_np[0]
        for n in (5, 6, 7, 8)
    ]
    assert counts == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("settings_", "named"),
    [((0, 2, 1), "prompt_lookup_min"), ((3, 2, 1), "prompt_lookup_max"), ((1, 1, 0), "num_spec")],
)
def test_bad_settings_are_named(settings_, named):
    with pytest.raises(ValueError, match=named):
        NgramProposer(*settings_)
