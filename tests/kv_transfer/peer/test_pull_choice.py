# SPDX-License-Identifier: Apache-2.0
"""Pulled or computed: beside whoever knows the true speeds, and tries every possibility."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_metal.kv_transfer.peer.line import Line
from vllm_metal.kv_transfer.peer.pull_choice import Circumstances, Offer, choose


def line(fixed, each, amounts=(1.0, 10.0, 100.0), enough=1.0):
    made = Line(enough)
    for amount in amounts:
        made.add(amount, fixed + each * amount)
    return made


@example(1.0, 0.0625, [1.0, 1.0, 5.0])  # two guesses in a row from equal amounts
@given(st.floats(0, 1), st.floats(1e-9, 1), st.lists(st.floats(1, 1e9), min_size=2, max_size=8))
def test_a_line_without_noise_is_found(fixed, each, amounts):
    amounts = [*amounts, 3 * max(amounts)]  # else nobody could tell the two parts apart
    made = line(fixed, each, amounts)
    for amount in amounts:
        assert made.at(amount) == pytest.approx(fixed + each * amount, rel=1e-3)


def test_short_transfers_do_not_spoil_the_rate_of_long_ones():
    made = line(0.02, 1e-8, [64e6, 32e6, *[1e3] * 20])
    assert made.at(64e6) == pytest.approx(0.02 + 0.64, rel=0.01)
    assert made.at(1e3) == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize("factor", [0.01, 0.5, 2, 100])
def test_a_line_follows_what_changes(factor):
    made = line(0.0, 1e-8, [1e6, 2e6] * 20)
    for amount in [1e6, 2e6] * 30:
        made.add(amount, factor * 1e-8 * amount)
    assert made.at(2e6) == pytest.approx(factor * 0.02, rel=0.1)


def test_one_that_is_far_off_is_left_out():
    made = line(0.0, 1.0, [5.0, 10.0] * 3)
    made.add(10.0, 1000.0)
    assert made.at(10.0) == pytest.approx(10.0)
    made.add(10.0, 10.0)
    made.add(10.0, 1000.0)
    assert made.at(10.0) == pytest.approx(10.0)


def test_many_short_ones_leave_what_is_known_of_long_ones():
    made = line(0.03, 2e-3, [500.0, 1000.0, *[1.0] * 300])
    assert made.at(1000.0) == pytest.approx(2.03, rel=0.01)


@pytest.mark.parametrize("amounts", [[5.0], [5.0] * 4])
def test_equal_amounts_are_all_it_knows(amounts):
    made = line(1.0, 1.0, amounts)
    assert made.at(5.0) == pytest.approx(6.0) and made.at(10.0) == pytest.approx(12.0)
    assert made.knows(5.0) == (len(amounts) > 1)


@pytest.mark.parametrize("amount", [5.0, 10.0])
def test_behind_equal_amounts_what_no_fixed_part_explains_is_far_off(amount):
    made = line(1.0, 0.0, [5.0] * 4)
    made.add(amount, 100.0)
    assert made.at(5.0) == pytest.approx(1.0)
    made.add(amount, 100.0)
    assert made.at(amount) == pytest.approx(100.0)


def test_far_beyond_what_was_seen_nothing_is_known():
    made = line(1.0, 1.0, [5.0, 10.0], enough=100.0)
    assert made.knows(40.0) and not made.knows(41.0)
    made.add(100.0, 1.0)
    assert made.knows(1e9)
    made.forget()
    assert not made.knows(1.0)


def test_nothing_is_known_of_nothing():
    made = Line(1.0)
    assert not made.knows(1e-9) and made.at(1e9) == made.each == 0.0


peers = st.lists(
    st.tuples(
        st.integers(1, 1000),  # tokens
        st.floats(0, 0.1),  # fixed seconds
        st.floats(1e-5, 1e-1),  # seconds a token's bytes
    ),
    min_size=1,
    max_size=8,
)


@given(peers, st.floats(1e-5, 1e-1), st.floats(0, 0.5), st.sampled_from([0.0, 1e-3]))
def test_of_what_is_known_exactly_the_soonest_is_chosen(found, each, wait, byte_seconds):
    """At one byte a token, as a plain search over all peers and computing finds it."""
    longest_prompt = max(tokens for tokens, _, _ in found)
    after = {
        number: wait
        + max(fixed + slope * tokens, byte_seconds * tokens)
        + each * (longest_prompt - tokens)
        for number, (tokens, fixed, slope) in enumerate(found)
    }
    computed = each * longest_prompt
    offers = {
        number: Offer(tokens, tokens, line(fixed, slope), 0.0)
        for number, (tokens, fixed, slope) in enumerate(found)
    }
    chosen = choose(offers, Circumstances(line(0.01, each), wait, byte_seconds))
    took = computed if chosen is None else after[chosen[0]]
    best = min(computed, *after.values())
    number = min(after, key=after.__getitem__)
    pull = max(
        found[number][1] + found[number][2] * found[number][0], byte_seconds * found[number][0]
    )
    assert took <= best + 0.1 * pull + 1e-3 * (took + wait) + 1e-9  # others are as good


def test_what_was_never_measured_is_tried():
    known, new = line(0, 1e-3), Line(1.0)
    fast = Circumstances(line(0, 1e-9))
    assert choose({"a": Offer(9, 9, known, 0.0), "b": Offer(5, 5, new, 0.0)}, fast)[0] == "b"
    assert choose({"a": Offer(9, 9, known, 0.0)}, fast) is None
    assert choose({"a": Offer(9, 9, known, 0.0)}, Circumstances(new))[0] == "a"
    assert choose({"a": Offer(999, 999, known, 0.0)}, Circumstances(new)) is None
    assert choose({"a": Offer(0, 0, new, 0.0)}, fast) is None


def test_peers_that_are_as_good_take_turns():
    now, used = Circumstances(line(0, 1.0)), {"a": 0.0, "b": 0.0, "slow": 0.0}
    links = {"a": line(0, 0.1), "b": line(0, 0.105), "slow": line(0, 0.3)}
    order = []
    for turn in range(6):
        offers = {peer: Offer(100, 100, links[peer], used[peer]) for peer in links}
        peer, seconds = choose(offers, now)
        assert seconds == pytest.approx(links[peer].at(100))
        order.append(peer)
        used[peer] = turn + 1.0
    assert order == ["a", "b"] * 3


def test_a_pull_that_may_take_no_longer_is_left():
    offers = {"a": Offer(100, 100, line(0, 0.1), 0.0)}
    assert choose(offers, Circumstances(line(0, 1.0), longest=9.0)) is None
    assert choose(offers, Circumstances(line(0, 1.0), longest=11.0)) is not None


def share_of_right_choices(rate, prefill, rng, count=200):
    """Requests of 16 to 8,192 tokens, one after another, of an 8B model of 131,072 bytes a token.

    Pulls vary by a fifth, computing by a tenth. What is measured is only what was chosen, by the
    time that it took. A choice is right if it took less than the other would have.
    """
    compute, link, right = Line(256.0), Line(64e6), 0
    for _ in range(count):
        tokens = 16 * round(2 ** rng.uniform(0, 9))
        num_bytes = 131072 * tokens
        pull = (0.015 + num_bytes / rate) * rng.uniform(0.8, 1.2)
        computing = (0.03 + tokens / prefill) * rng.uniform(0.9, 1.1)
        last = (0.03 + 1 / prefill) * rng.uniform(0.9, 1.1)  # after a pull, one token is left
        chosen = choose({0: Offer(tokens, num_bytes, link, 0.0)}, Circumstances(compute))
        if chosen is None:
            compute.add(tokens, computing)
        else:
            link.add(num_bytes, pull)
            compute.add(1, last)
        right += (pull + last < computing) == (chosen is not None)
    return right / count


#: Bytes a second: what 10 GbE, 1 GbE and a bad Wi-Fi bring.
@pytest.mark.parametrize(
    "rate", [0.118e9, *(pytest.param(rate, marks=pytest.mark.more) for rate in (1.18e9, 0.02e9))]
)
def test_with_noise_the_choice_is_the_faster_one(rate):
    """On Macs that prefill 225, 608 and 1,470 tokens a second."""
    shares = [
        share_of_right_choices(rate, prefill, random.Random(seed))
        for prefill in (225, 608, 1470)
        for seed in range(7)
    ]
    print(f"{rate:.3g} B/s: {sum(shares) / len(shares):.3f} right, at least {min(shares):.3f}")
    assert sum(shares) / len(shares) >= 0.95
