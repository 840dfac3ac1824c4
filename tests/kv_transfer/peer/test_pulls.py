# SPDX-License-Identifier: Apache-2.0
"""Pull or compute, against a naive formula; avoided peers; time limits."""

import pickle
import random
from contextlib import ExitStack

import numpy as np
import pytest
from vllm.v1.kv_offload.base import make_offload_key

from vllm_metal.identity.fingerprint import Fingerprint, PoolContent
from vllm_metal.kv_transfer.peer.pulls import SLACK_S, Patience, PullCounts, Puller, PullHint
from vllm_metal.settings.address import Address

A, B = Address("a", 1), Address("b", 1)
PAGE, BLOCK = 1 << 20, 16


def content(*sizes):
    return PoolContent(Fingerprint("f00d", {"block_size": BLOCK}), sizes or (PAGE,))


def keys_of(count, group=0):
    return [bytes(make_offload_key(bytes([i % 256, i // 256]) * 16, group)) for i in range(count)]


def pull(puller, keys, address, seconds, now=0.0, failed=False):
    """Makes pages be pulled from their only peer, and waits for the end."""
    chosen = puller.decide(keys, {address: keys}, now)
    assert set(puller.begin(chosen, keys, now).peers.values()) == {address}
    puller.end(chosen, failed, now + seconds)
    return now + seconds


def measured(links, compute=None, sizes=(PAGE,)):
    """Makes a puller with known seconds per page of each peer and per block, and its clock."""
    puller, now = Puller(content(*sizes)), 0.0
    for address, seconds in links.items():
        for count in (8, 8):
            now = pull(puller, keys_of(count), address, seconds * count, now)
    for _ in range(2 if compute else 0):
        puller.computed(8 * BLOCK, 8 * compute)
    return puller, now


@pytest.mark.parametrize("compute", [None, 0.002, 0.2, 2.0])
@pytest.mark.parametrize("link", [None, 0.001, 0.1, 1.0])
@pytest.mark.parametrize("count", [1, 30])
def test_a_pull_is_chosen_where_bytes_by_rate_take_no_longer_than_tokens_by_rate(
    link, compute, count
):
    puller, now = measured({} if link is None else {A: link}, compute)
    seconds_of_link = count * PAGE / (PAGE / link) if link else 0.0  # bytes by bytes per second
    seconds_of_compute = count * BLOCK / (BLOCK / compute) if compute else 0.0
    keys = keys_of(count)
    chosen = puller.decide(keys, {A: keys}, now)
    assert (chosen is not None) == (seconds_of_link <= seconds_of_compute)


def test_of_nothing_nothing_is_pulled_or_counted():
    puller, now = measured({}, 1.0)
    assert puller.decide(keys_of(4), {A: frozenset()}, now) is None
    assert puller.counts == PullCounts()


def test_the_first_requests_pull_and_then_one_computes():
    puller, now = Puller(content()), 0.0
    for _ in range(2):
        now = pull(puller, keys_of(4), A, 1.0, now)
    assert puller.decide(keys_of(4), {A: keys_of(4)}, now) is None
    for _ in range(2):
        puller.computed(4 * BLOCK, 5.0)
    assert puller.decide(keys_of(4), {A: keys_of(4)}, now) is not None
    assert puller.counts == PullCounts(pulled=3, computed=1)


@pytest.mark.parametrize("changed_to", [0.01, 0.3, 3.0])
def test_rates_are_averages_of_which_the_latest_counts_most(changed_to):
    """Compares with naive sums that weigh each measurement 0.9 of the next."""
    puller, now = measured({A: 0.1}, 0.2)
    pages, seconds, keys = [8, 8], [0.8, 0.8], keys_of(2)
    for _ in range(20):
        weights = [0.9**age for age in reversed(range(len(pages)))]
        naive = np.dot(weights, seconds) / np.dot(weights, pages)
        chosen = puller.decide(keys, {A: keys}, now)
        assert (chosen is None) == (naive > 0.2), len(pages)
        if chosen is None:
            break
        puller.begin(chosen, keys, now)
        now += 2 * changed_to
        puller.end(chosen, False, now)
        pages.append(2)
        seconds.append(2 * changed_to)
    assert (chosen is None) == (changed_to > 0.2)


def test_single_tokens_say_nothing_of_prefill():
    puller, now = measured({A: 0.1}, 0.05)
    for _ in range(100):
        puller.computed(1, 0.03)
    assert puller.decide(keys_of(30), {A: keys_of(30)}, now) is None


def test_the_faster_link_is_chosen_and_a_longer_prefix_if_it_is_worth_it():
    puller, now = measured({A: 0.1, B: 0.2}, 1.0)
    keys = keys_of(64)
    assert puller.decide(keys, {A: keys, B: keys}, now).address == A
    assert puller.decide(keys, {A: keys[:10], B: keys}, now).address == B
    assert puller.decide(keys, {A: [*keys[:5], *keys[6:]]}, now).keys == frozenset(keys[:5])


def test_peers_that_are_as_good_take_turns():
    puller, now = measured({A: 0.1, B: 0.104}, 1.0)
    keys, both = keys_of(30), {A: keys_of(30), B: keys_of(30)}
    order = [puller.decide(keys, both, now + turn).address for turn in range(6)]
    assert order == [A, B] * 3


def test_pulls_that_go_on_come_first():
    puller, now = measured({A: 0.45}, 1.0)
    keys, going = keys_of(64), []
    while (chosen := puller.decide(keys, {A: keys}, now)) is not None:
        puller.begin(chosen, keys, now)
        going.append(chosen)
    assert len(going) == 2  # a third would be there after 86 s, and computing takes 64
    for chosen in going:
        puller.give_up(chosen)
    assert puller.decide(keys, {A: keys}, now) is not None


def test_a_slow_link_is_tried_again_after_a_minute():
    puller, now = measured({A: 1.0}, 0.1)
    keys = keys_of(30)
    assert puller.decide(keys, {A: keys}, now + 59.0) is None
    assert puller.decide(keys, {A: keys}, now + 60.0) is not None


def test_who_fails_is_avoided_for_longer_each_time(log):
    puller, now, keys = Puller(content()), 0.0, keys_of(4)
    for seconds in (10, 20, 40, 80, 160, 300, 300):
        now = pull(puller, keys, A, 0.1, now, failed=True)
        assert not puller.is_usable(A, now + seconds - 1) and puller.is_usable(B, now)
        now += seconds
        assert puller.is_usable(A, now)
    now = pull(puller, keys, A, 0.1, now)
    now = pull(puller, keys, A, 0.1, now, failed=True)
    assert puller.is_usable(A, now + 10) and puller.counts.failed == 8
    assert len(log.warnings()) == 2  # once a row of failures
    puller.retain([B])
    assert puller.is_usable(A, now)


def test_of_several_groups_a_pull_at_risk_is_short():
    """A load that fails there leaves nothing, so its time is lost."""
    puller, now = measured({A: 0.02}, 1.0, sizes=(PAGE, PAGE))
    full, window = keys_of(64, 0), keys_of(64, 1)
    keys = [*full, *window]
    short, long = [*full[:30], window[29]], [*full, window[63]]
    chosen = puller.decide(keys, {A: short}, now)
    assert chosen.keys == frozenset(short)
    assert puller.decide(keys, {A: long}, now) is None
    assert puller.begin(chosen, keys, now).patience.page_seconds == 0.0


def test_other_weights_compute_at_another_speed():
    puller, now = measured({A: 0.1}, 0.5)
    keys = keys_of(4)
    hint = puller.begin(puller.decide(keys, {A: keys}, now), keys, now)
    assert hint.patience.page_seconds == pytest.approx(0.5)
    puller.use(content())
    assert puller.decide(keys, {A: keys}, now) is None  # computes, and so measures it
    hint = puller.begin(puller.decide(keys, {B: keys}, now), keys, now)
    assert hint.patience.page_seconds is None


def share_of_right_choices(rate, prefill, rng, count=200):
    """Requests of 16 to 8,192 tokens, one after another, of an 8B model of 131,072 bytes a token.

    Pulls vary by a fifth, computing by a tenth, and both have a fixed time. Only what was
    chosen is measured. A choice is right if it took less than the other would have.
    """
    puller, now, right = Puller(content(131072 * BLOCK)), 0.0, 0
    for _ in range(count):
        keys = keys_of(round(2 ** rng.uniform(0, 9)))
        tokens = BLOCK * len(keys)
        pulling = (0.015 + 131072 * tokens / rate) * rng.uniform(0.8, 1.2)
        computing = (0.03 + tokens / prefill) * rng.uniform(0.9, 1.1)
        last = (0.03 + 1 / prefill) * rng.uniform(0.9, 1.1)  # after a pull, one token is left
        chosen = puller.decide(keys, {A: keys}, now)
        right += (pulling + last < computing) == (chosen is not None)
        if chosen is None:
            puller.computed(tokens, computing)
            now += computing
        else:
            puller.begin(chosen, keys, now)
            now += pulling
            puller.end(chosen, False, now)
            puller.computed(1, last)
            now += last
    return right / count


#: Bytes a second: what 10 GbE, 1 GbE and a bad Wi-Fi bring.
@pytest.mark.parametrize("rate", [1.18e9, 0.118e9, 0.02e9])
def test_with_noise_the_choice_is_the_faster_one(rate):
    """On Macs that prefill 225, 608 and 1,470 tokens a second."""
    shares = [
        share_of_right_choices(rate, prefill, random.Random(seed))
        for prefill in (225, 608, 1470)
        for seed in range(3)
    ]
    print(f"{rate:.3g} B/s: {sum(shares) / len(shares):.3f} right, at least {min(shares):.3f}")
    assert sum(shares) / len(shares) >= 0.9


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
    assert sent.peers == hint.peers and not sent.patience.is_over
    assert sent.patience.page_seconds == page_seconds
