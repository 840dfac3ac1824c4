# SPDX-License-Identifier: Apache-2.0
"""Pages of the pool that peers may get, and blocks kept for them."""

import pickle

import pytest

from vllm_metal.kv_transfer.shared_pool import SharedPool
from vllm_metal.patches.vllm_patches.cached_blocks import CacheChanges

SIZE = 100


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def over():
    return []


@pytest.fixture
def pool(clock, over):
    made = SharedPool(over.extend, clock)
    made.wake_event.connect(lambda: True)
    return made


def changes(come=(), gone=(), is_all=False):
    return CacheChanges(is_all, dict(come), tuple(gone))


def begun(pool, come):
    """Starts with these blocks in the pool, some steps ago."""
    pool.begin_step(changes(come, is_all=True))
    for _ in range(2):
        pool.begin_step(None)
    return pool


def want(pool, *keys):
    expected = []
    pool.want(keys, expected.extend)
    return expected


def take(pool, most=10 * SIZE):
    return pool.take(lambda key: SIZE, most)


def test_nothing_is_known_before_the_scheduler_says_what_is_there(pool):
    pool.begin_step(changes({b"a": 1}))
    assert not pool.contains(b"a")
    begun(pool, {b"b": 2})
    assert pool.contains(b"b") and not pool.contains(b"a")


def test_a_block_may_be_copied_two_steps_after_the_one_that_completes_it(pool):
    begun(pool, {})
    pool.begin_step(changes({b"a": 1}))
    assert pool.contains(b"a") and want(pool, b"a") == [b"a"]
    assert take(pool) == {} and pool.is_waited_for
    pool.begin_step(None)
    assert take(pool) == {}
    pool.begin_step(None)
    assert take(pool) == {b"a": 1} and take(pool) == {}


def test_a_block_that_goes_is_wanted_no_more(pool, over):
    begun(pool, {b"a": 1, b"b": 2, b"c": 3})
    want(pool, b"a", b"b")
    pool.begin_step(changes({b"b": 7}, gone=[b"a"]))
    assert over == [b"a"] and not pool.contains(b"a")
    for _ in range(2):
        pool.begin_step(None)
    assert take(pool) == {b"b": 7}
    pool.begin_step(changes({b"c": 3}, is_all=True))
    assert pool.contains(b"c") and not pool.contains(b"b")


def test_pages_leave_in_the_order_of_asking_and_end_once(pool, over):
    begun(pool, {b"a": 1, b"b": 2, b"c": 3})
    assert want(pool, b"c", b"a", b"x", b"c") == [b"c", b"a"]
    assert want(pool, b"a", b"b") == [b"b"]
    assert list(take(pool, 2 * SIZE)) == [b"c", b"a"]
    assert take(pool, SIZE - 1) == {}
    assert list(take(pool, SIZE)) == [b"b"]
    pool.ended([b"c"])
    pool.ended([b"c", b"a"])
    assert over == [b"c", b"a"] and pool.is_waited_for
    pool.ended([b"b"])
    assert not pool.is_waited_for


def test_a_pool_that_goes_ends_all(pool, over):
    begun(pool, {b"a": 1, b"b": 2})
    want(pool, b"a", b"b")
    take(pool, SIZE)
    pool.lease(1, [b"a"], 30)
    assert pool.wake_event.is_set
    pool.clear()
    assert sorted(over) == [b"a", b"b"] and not pool.wake_event.is_set
    assert not pool.contains(b"a") and want(pool, b"a") == [] and pool.num_leased == 0
    pool.begin_step(changes({b"a": 1}))
    assert not pool.contains(b"a")


def test_where_nobody_hears_the_bell_nothing_is_offered(over):
    pool = begun(SharedPool(over.extend), {b"a": 1})
    pool.lease(1, [b"a"], 30)
    assert not pool.contains(b"a") and want(pool, b"a") == [] and pool.num_leased == 0


def test_leases_become_pins_while_one_of_them_lasts(pool, clock):
    begun(pool, {b"a": 1, b"b": 2})
    pool.lease(1, [b"a", b"x"], 30)
    pool.lease(2, [b"a", b"b"], 30)
    first = pool.pin_changes()
    assert (sorted(first.pin), first.unpin) == ([b"a", b"b"], ())
    assert pool.pin_changes() is None
    pool.release(2, [b"b"])
    pool.release(2, [b"a"])
    assert pool.pin_changes().unpin == (b"b",)
    clock.now = 20
    pool.renew(1, 30)
    clock.now = 40
    assert pool.pin_changes() is None
    clock.now = 50
    assert pool.pin_changes().unpin == (b"a",)
    pool.lease(3, [b"a"], 30)
    pool.pin_changes()
    pool.release(3, None)
    assert pool.pin_changes().unpin == (b"a",)


def test_a_bell_that_was_pickled_is_another_that_nobody_hears(pool):
    copied = pickle.loads(pickle.dumps(pool.wake_event))
    copied.set()
    assert not copied.is_connected and not copied.is_set and not pool.wake_event.is_set


def test_an_engine_that_ends_is_not_rung(pool):
    pool.wake_event.connect(lambda: False)
    begun(pool, {b"a": 1})
    want(pool, b"a")
    assert not pool.wake_event.is_set
