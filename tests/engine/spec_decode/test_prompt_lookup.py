# SPDX-License-Identifier: Apache-2.0
"""Requests that copy their own text: found, followed through edits, and given up."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engine.batch.test_requests import new_request
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_metal.engine.batch.requests import BlockTables, Requests
from vllm_metal.engine.spec_decode.adaptive import DraftLengths
from vllm_metal.engine.spec_decode.prompt_lookup import INTERVAL, MOST_INDEXED, NGRAM, PromptLookup
from vllm_metal.engine.spec_decode.proposer import Drafts, Proposer
from vllm_metal.engine.spec_decode.speculator import Speculator

ROOT = Path(__file__).parents[3]
K, MAX_LEN = 7, 1 << 14
CODE, PROSE = "vllm_metal/engine/worker/recovery.py", "LICENSE"


def words(path):
    """Returns a file's words, blanks and signs as numbers."""
    numbers = {}
    found = re.findall(r"\w+|\s+|\W", (ROOT / path).read_text())
    return [numbers.setdefault(word, len(numbers)) for word in found]


class Network(Proposer):
    """Drafts a known text's next tokens, each right with probability `right`."""

    reads_text = False

    def __init__(self, text, right=0.7):
        self.text, self._knows = text, np.random.default_rng(0).random(MAX_LEN) < right
        self.num_written = 0

    def propose(self, request):
        guesses = []
        for length, limit in zip(request.num_tokens_np, request.limits_np, strict=True):
            places = range(length, min(length + limit, len(self.text)))
            guesses.append([self.text[at] if self._knows[at] else -1 for at in places])
            self.num_written = int(length)
        return Drafts.of_lists(guesses, K)


class Noting(DraftLengths):
    """Counts drafts and steps."""

    num_drafted = num_steps = 0

    def observe_drafts(self, req_indices_np, drafted_np, accepted_np):
        assert len(req_indices_np) == len(drafted_np) == len(accepted_np)
        self.num_drafted += int(drafted_np.sum())

    def observe_step(self, num_rows, seconds):
        self.num_steps += 1

    def acceptance(self):
        return 1.0  # no warning


class Generation:
    """A request with a known text, verified step by step as in an engine."""

    def __init__(self, prompt, output, lookup):
        self.text = [*prompt, *output]
        self.requests = Requests(1, MAX_LEN, BlockTables(1, 1, 1))
        self.network, self.lengths = Network(self.text), Noting(K)
        self.speculator = Speculator(
            self.requests, self.network, self.lengths, K, lookup=PromptLookup(1) if lookup else None
        )
        data = new_request("r", list(prompt), ([1],), len(prompt) - 1)
        self.state = self.requests.add_request(data)
        self.speculator.enter(self.state)
        self.num_steps = self.num_waits = self.num_accepted = self.num_copied = 0
        self._take(1)

    @property
    def length(self):
        return int(self.requests.num_known_np[0])

    def _take(self, count):
        self.requests.note_sampled(np.array([0]), count)
        self.requests.append_tokens(self.state, self.text[self.length : self.length + count])

    def step(self):
        """Verifies a step's drafts, and returns them and whether they are copied."""
        self.requests.num_computed_tokens_np[0] = self.length - 1
        self.num_waits += self.speculator.is_copying(["r"])
        found = self.speculator.step_drafts({"r": 1 + K}, {"r": [-1] * K})
        drafts = np.array(found.token_ids)[0, : found.counts_np[0]].tolist()
        right = [a == b for a, b in zip(drafts, self.text[self.length :], strict=False)]
        num_accepted = right.index(False) if False in right else len(right)
        assert self.network.num_written == self.length  # it is asked in any case
        copied = found.copied_np is not None
        self.num_steps += 1
        self.num_accepted += num_accepted
        self.num_copied += copied
        self._take(1 + num_accepted)
        batch = SimpleNamespace(
            requests=[self.state],
            sampling_np=np.array([0]),
            req_indices_np=np.array([0]),
            query_start_loc_np=np.array([0, 1 + len(drafts)]),
            drafts=found,
        )
        output = SimpleNamespace(
            batch=batch, token_ids=list, num_accepted=lambda: np.array([num_accepted])
        )
        self.speculator.record([output])
        return drafts, copied

    def run(self):
        while self.length < len(self.text) - K - 1:
            self.step()
        return self


def edited(text, rng, every=80):
    """Returns a text with some words replaced, inserted or removed, and some lines removed."""
    found, at = [], 0
    while at < len(text):
        end = at + int(rng.integers(every // 2, 2 * every))
        found += text[at:end]
        kind = rng.integers(4)
        found += [5000 + at] * int(rng.integers(1, 4)) if kind < 3 else []
        at = end + (0, 1, 2, 12)[kind]
    return found


def test_an_edited_file_is_copied_and_prose_is_not():
    code, prose = words(CODE), words(PROSE)
    rng = np.random.default_rng(1)
    pairs = {"edits": (code, edited(code, rng)), "prose": (prose[:300], prose[300:])}
    rates, waits = {}, {}
    for name, (prompt, output) in pairs.items():
        for lookup in (False, True):
            run = Generation(prompt, output, lookup).run()
            rates[name, lookup] = run.num_accepted / run.num_steps
            waits[name] = run.num_waits / run.num_steps
    assert rates["edits", False] >= 1.5
    assert rates["edits", True] >= 2 * rates["edits", False]
    assert rates["prose", True] >= 0.98 * rates["prose", False]  # steps begin at other tokens
    assert waits["edits"] > 0.8 and waits["prose"] < 0.03


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(2, 40))
def test_copies_are_of_the_texts_own_and_begin_with_a_long_match(seed, num_tokens):
    """By definition, the text with its drafts continues as at an earlier place."""
    rng = np.random.default_rng(seed)
    file = rng.integers(0, num_tokens, 120).tolist()
    run, copied = Generation(file, edited(file, rng, 30), lookup=True), False
    while run.length < len(run.text) - K - 1:
        known, before = run.text[: run.length], copied
        drafts, copied = run.step()
        if not copied:
            continue
        pieces = [(known + drafts)[at : at + len(drafts)] for at in range(len(known))]
        assert drafts in pieces and drafts
        if not before:  # up to INTERVAL tokens were not looked at yet
            assert len(known) >= len(file) + NGRAM
            ends = range(len(known) - (INTERVAL - 1) - K, len(known) + 1)
            grams = [known[end - NGRAM : end] for end in ends if end >= NGRAM]
            assert any(
                known[at : at + NGRAM] == gram for gram in grams for at in range(len(known) - NGRAM)
            )


FILE = list(range(100, 250))
EDITS = {  # of FILE, and whether the copy goes on
    "a token in place of another": ([*FILE[:60], 900, *FILE[61:]], True),
    "two in place of two": ([*FILE[:60], 900, 901, *FILE[62:]], True),
    "some left out": ([*FILE[:60], *FILE[80:]], True),
    "many put in": ([*FILE[:60], *range(900, 940), *FILE[60:]], False),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_copy_goes_on_after_a_small_edit_and_ends_with_two_misses(name):
    output, goes_on = EDITS[name]
    run = Generation(FILE, output, lookup=True)
    run.network.text = []  # it drafts nothing
    steps = []
    while run.length < len(run.text) - K - 1:
        before = run.length
        _, copied = run.step()
        steps.append((copied, run.length - before > 1))
    copied = [copied for copied, _ in steps]
    first = copied.index(True)
    assert copied[-1] and all(copied[first:]) == goes_on
    missed = [is_copy for is_copy, hit in steps if not hit][first:]
    assert sum(missed) <= 2 and (goes_on or missed[:2] == [True, True])


@pytest.mark.parametrize("period", [1, 3, K + 2])
def test_a_text_that_repeats_gets_all_drafts_whatever_its_period(period):
    run = Generation(FILE, np.resize(range(900, 900 + period), 200).tolist(), lookup=True)
    run.network.text = []  # it drafts nothing
    while not run.step()[1]:
        pass
    before = run.num_accepted, run.num_steps
    run.run()
    assert run.num_accepted - before[0] == K * (run.num_steps - before[1])


def test_only_the_networks_drafts_say_how_many_are_worth_it():
    run = Generation(FILE, FILE, lookup=True).run()
    assert run.lengths.num_drafted == K * (run.num_steps - run.num_copied) > 0
    assert run.lengths.num_steps < run.num_steps - run.num_copied
    assert run.num_copied > 10


def test_a_long_prompt_is_indexed_in_parts_as_its_rows_are_computed():
    length = 2 * MOST_INDEXED + 100
    table = np.arange(2 * length, dtype=np.int32)[None]
    table[0, length : length + 40] = table[0, 5000:5040]
    lookup = PromptLookup(1)
    lookup.begin_request(0, length)
    rows = np.array([0])
    steps = [length + 20 + number for number in range(4)]
    found = [lookup.update(table, rows, np.array([count], np.int32)) for count in steps]
    assert found == [False, False, True, True]
    lookup.begin_request(0, length)
    for count in (MOST_INDEXED // 2, MOST_INDEXED, 2 * MOST_INDEXED, length):
        assert not lookup.update(table, rows, np.array([count], np.int32))
    assert lookup.update(table, rows, np.array([length + 20], np.int32))


def test_a_row_that_changes_hands_copies_nothing_of_the_text_before():
    table = np.resize(np.arange(20, dtype=np.int32), (1, 60))
    lookup, rows, known = PromptLookup(1), np.array([0]), np.array([50], np.int32)
    lookup.begin_request(0, 20)
    assert lookup.update(table, rows, known)
    assert lookup.drafts(table, rows, known, np.array([3]), K).counts_np.tolist() == [3]
    lookup.forget_request(0)
    assert not lookup.copying_np.any()
    table[0] = np.arange(60)
    lookup.begin_request(0, 20)
    assert not lookup.update(table, rows, known)
