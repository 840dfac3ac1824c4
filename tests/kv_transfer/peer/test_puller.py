# SPDX-License-Identifier: Apache-2.0
"""What is pulled, how that is measured, and who is left alone, by a clock that tests set."""

import pytest
from vllm.v1.kv_offload.base import make_offload_key

from vllm_metal.kv_transfer.fingerprint import Fingerprint, PoolContent
from vllm_metal.kv_transfer.peer.address import Address
from vllm_metal.kv_transfer.peer.puller import PROBE_BYTES, PullCounts, Puller

A, B = Address("a", 1), Address("b", 1)
PAGE, BLOCK = 1 << 20, 16


def content(*sizes):
    return PoolContent(Fingerprint("f00d", {"block_size": BLOCK}), sizes or (PAGE,))


def keys_of(count, group=0, seed=0):
    return [bytes(make_offload_key(bytes([seed, i]) * 16, group)) for i in range(count)]


@pytest.fixture
def puller(clock):
    return Puller(content(), clock)


def pull(puller, clock, keys, found, seconds):
    """Has one pulled, which takes so long."""
    chosen = puller.decide(keys, found)
    assert chosen is not None
    assert set(chosen.begin(keys).places.values()) == {chosen.address}
    clock.now += seconds
    chosen.ended(failed=False)
    return chosen.address


def measure(puller, clock, at, num_bytes, seconds):
    """A pull that nobody chose."""
    began = puller.begins(at, 0.0)
    clock.now += seconds
    puller.ended(at, num_bytes, began, failed=False)


def knows(puller, clock, link, compute):
    """Lets it measure both; seconds of a page, and of a block's tokens."""
    for count in (1, 64, 8, 64):
        for at, seconds in link.items():
            measure(puller, clock, at, count * PAGE, count * seconds)
        puller.computed(count * BLOCK, count * compute, 0.0)


def test_what_was_never_measured_is_pulled(puller, clock):
    keys = keys_of(4)
    assert puller.decide(keys, {A: frozenset()}) is None
    assert pull(puller, clock, keys, {A: keys}, 1.0) == A
    assert puller.counts == PullCounts(pulled=1)


@pytest.mark.parametrize(("link", "compute", "who"), [(0.1, 1.0, A), (1.0, 0.1, None)])
def test_the_faster_one_is_chosen(puller, clock, link, compute, who):
    knows(puller, clock, {A: link}, compute)
    chosen = puller.decide(keys_of(32), {A: keys_of(32)})
    assert (chosen and chosen.address) == who


def test_the_faster_link_is_chosen_and_a_longer_prefix_if_it_is_worth_it(puller, clock):
    knows(puller, clock, {A: 0.1, B: 0.2}, 1.0)
    keys = keys_of(64)
    assert puller.decide(keys, {A: keys, B: keys}).address == A
    assert puller.decide(keys, {A: keys[:10], B: keys}).address == B
    gap = [*keys[:5], *keys[6:]]
    chosen = puller.decide(keys, {A: gap})
    assert chosen.keys == frozenset(keys[:5])


def test_a_queue_of_pulls_counts(puller, clock):
    knows(puller, clock, {A: 0.45}, 1.0)
    keys, going = keys_of(64), []
    while (chosen := puller.decide(keys, {A: keys})) is not None:
        chosen.begin(keys)
        going.append(chosen)
    assert len(going) == 2  # a third would be there after 86 s, and computing takes 64
    for chosen in going:
        chosen.given_up()
    assert puller.decide(keys, {A: keys}) is not None


def test_beside_streams_a_piece_of_8_mib_comes_in_with_a_step(puller, clock):
    knows(puller, clock, {A: 0.001}, 0.01)
    keys = keys_of(64)
    puller.computed(0, 0.0, 0.05)
    assert puller.decide(keys, {A: keys}) is not None  # 8 steps of 50 ms for 0.64 s of computing
    puller.computed(0, 0.0, 0.1)
    assert puller.decide(keys, {A: keys}) is None  # 8 of 100 ms
    clock.now += 2.0
    assert puller.decide(keys, {A: keys}) is not None


def test_who_fails_is_left_alone_for_longer_each_time(puller, clock, log):
    keys = keys_of(4)
    for seconds in (10, 20, 40):
        chosen = puller.decide(keys, {A: keys})
        chosen.begin(keys)
        chosen.ended(failed=True)
        assert not puller.trusts(A) and puller.trusts(B)
        clock.now += seconds - 1
        assert not puller.trusts(A)
        clock.now += 1
        assert puller.trusts(A)
    pull(puller, clock, keys, {A: keys}, 0.1)
    chosen = puller.decide(keys, {A: keys})
    chosen.begin(keys)
    chosen.ended(failed=True)
    clock.now += 10
    assert puller.trusts(A) and puller.counts.failed == 4
    assert len(log.warnings()) == 2  # once a row of failures


def test_a_slow_link_is_probed_and_measured_anew_once_it_is_faster(puller, clock):
    knows(puller, clock, {A: 1.0}, 0.1)
    keys = keys_of(32)
    assert puller.decide(keys, {A: keys}) is None
    assert puller.to_probe([A]) == [A] and puller.to_probe([A]) == []
    puller.probed(A, PROBE_BYTES, 0.9)
    assert puller.decide(keys, {A: keys}) is None
    clock.now += 30
    assert puller.to_probe([A]) == [A]
    puller.probed(A, PROBE_BYTES, 0.01)
    assert puller.decide(keys, {A: keys}).address == A


def test_of_several_groups_a_pull_at_risk_is_short(clock):
    """A load that fails there leaves nothing, so the time that it took is lost."""
    puller = Puller(content(PAGE, PAGE), clock)
    full, window = keys_of(64, 0), keys_of(64, 1)
    keys = [*full, *window]
    for count in (1, 64, 8, 64):
        there = [*full[:count], *window[count - 1 : count]]
        measure(puller, clock, A, len(there) * PAGE, 0.02 * len(there))
        puller.computed(count * BLOCK, count * 1.0, 0.0)
    short, long = [*full[:30], window[29]], [*full, window[63]]
    assert puller.decide(keys, {A: short}).keys == frozenset(short)
    assert puller.decide(keys, {A: long}) is None
    patience = puller.patience()
    with patience.fetching(1000):
        assert patience.page_seconds == 0.0


def test_other_weights_compute_at_another_speed(puller, clock):
    knows(puller, clock, {A: 1.0}, 0.1)
    keys = keys_of(4)
    assert puller.patience().page_seconds == pytest.approx(0.1)
    puller.use(content())
    assert puller.patience().page_seconds is None
    assert (
        puller.decide(keys, {A: keys}) is None
    )  # the link is slow enough to see what computing is
