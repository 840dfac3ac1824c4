# SPDX-License-Identifier: Apache-2.0
"""How long a load waits for peers, by a clock that tests set."""

import pickle
from contextlib import ExitStack

import pytest

from vllm_metal.kv_transfer.peer.address import Address
from vllm_metal.kv_transfer.peer.pull_hint import SLACK_S, Patience, PullHint


def test_it_ends_when_computing_would_be_that_far_ahead(clock):
    patience = Patience(0.5, clock)
    with patience.fetching(4):
        clock.now += 2.0 + SLACK_S - 0.01
        assert not patience.is_over
        clock.now += 0.02
        assert patience.is_over


def test_pages_that_came_count_and_time_between_fetches_does_not(clock):
    patience = Patience(1.0, clock)
    with patience.fetching(2):
        clock.now += 1.0
    clock.now += 1000.0
    assert not patience.is_over
    with patience.fetching(1):
        clock.now += 2.0 + SLACK_S - 0.01
        assert not patience.is_over
        clock.now += 0.02
        assert patience.is_over


def test_two_fetches_at_one_time_take_the_time_once(clock):
    patience = Patience(0.0, clock)
    with ExitStack() as stack:
        stack.enter_context(patience.fetching(1))
        with patience.fetching(1):
            clock.now += SLACK_S - 0.01
        assert not patience.is_over
        clock.now += 0.02
        assert patience.is_over


def test_where_nothing_is_known_each_fetch_may_take_so_long(clock):
    patience = Patience(None, clock)
    for _ in range(5):
        with patience.fetching(1):
            clock.now += SLACK_S - 0.01
            assert not patience.is_over
    with patience.fetching(1):
        clock.now += SLACK_S + 0.01
        assert patience.is_over


@pytest.mark.parametrize("page_seconds", [None, 0.0, 0.25])
def test_it_starts_anew_in_the_worker(page_seconds):
    hint = PullHint({b"key": Address("a", 1)}, Patience(page_seconds))
    sent = pickle.loads(pickle.dumps(hint))
    assert sent.places == hint.places and not sent.patience.is_over
    assert sent.patience.page_seconds == page_seconds
