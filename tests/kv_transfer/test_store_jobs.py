# SPDX-License-Identifier: Apache-2.0
"""Blocks are stored in batches within limits, and no step waits for the disk."""

import time

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_transfer.small_pool import (
    CONTENT,
    PAGE_BYTES,
    SmallPool,
    all_ended,
    held_up,
    keys_of,
    on_disk,
    store_on,
)

from vllm_metal.identity.fingerprint import Fingerprint, PoolContent
from vllm_metal.kv_transfer import store_jobs as module
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.store import DiskStore
from vllm_metal.kv_transfer.page_store import TRANSFERS, PageStore
from vllm_metal.kv_transfer.peer.store import PeerStore
from vllm_metal.kv_transfer.store_jobs import StoreJobs


@pytest.fixture
def pool():
    return SmallPool()


@pytest.fixture
def stores(store, pool):
    return made(store, pool)


def made(store, pool, **options):
    stores = StoreJobs(store, 4, 4 * PAGE_BYTES, **options)
    stores.use(pool.pages)
    return stores


def step(stores, num_left=0):
    """Runs a step with a batch; returns its number of pages."""
    arrays = stores.queue_batch()
    mx.async_eval(arrays)
    stores.step_submitted()
    stores.end_step()
    stores.steps_computed(num_left)
    return len(arrays[0]) if arrays else 0


def finish(stores, *wanted):
    return all_ended(stores.finished, wanted)


@pytest.fixture
def blocked(monkeypatch):
    """A disk that blocks all writes until the event is set."""
    yield from held_up(monkeypatch, "write")


def test_pages_go_in_batches_of_bytes(stores, store, pool, monkeypatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 3 * PAGE_BYTES)
    keys = keys_of("abc")
    stores.add(0, "r", keys_of("ab"), [5, 3])
    assert step(stores) == 0 and stores.due_ends() == {}
    third = keys_of("abc")
    third.keys, third.ends = third.keys[2:], third.ends[2:]
    stores.add(1, "r", third, [7])
    assert stores.due_ends() == {"r": 12}
    assert step(stores) == 3
    ended = finish(stores, 0, 1)
    assert ended[0].num_bytes == 2 * PAGE_BYTES and ended[1].num_bytes == PAGE_BYTES
    assert on_disk(store, keys) == [pool.block(5), pool.block(3), pool.block(7)]
    assert not stores.busy


def test_copies_are_written_once_their_step_is_known_to_be_computed(store, pool):
    stores = made(store, pool, batch_steps=0)
    keys = [keys_of(name) for name in "abcd"]
    for number, of in enumerate(keys):
        stores.add(number, "r", of, [3 + number])
        step(stores, num_left=9)
    step(stores, num_left=9)
    store.writer.submit(lambda: None).result()  # behind whatever would be written
    assert stores.finished() == []
    stores.steps_computed(3)  # the steps with "a" and "b"; the last took none along
    assert finish(stores, 0, 1).keys() == {0, 1}
    stores.drop_pool()
    lost = finish(stores, 2, 3)
    assert [job.num_bytes for job in lost.values()] == [0, 0] and not stores.busy
    assert [on_disk(store, of) for of in keys] == [[pool.block(3)], [pool.block(4)], [None], [None]]


@pytest.mark.parametrize("how", ["requests", "keys"])
def test_what_is_taken_back_before_its_step_is_known_is_not_written(store, pool, how):
    stores = made(store, pool, batch_steps=0)
    keys = keys_of("ab")
    stores.add(0, "r", keys_of("a"), [5])
    second = keys_of("ab")
    second.keys, second.ends = second.keys[1:], second.ends[1:]
    stores.add(1, "s", second, [3])
    step(stores, num_left=9)
    if how == "requests":
        stores.drop_requests({"s"})
    else:
        stores.drop_keys(second.keys)
    stores.steps_computed(0)
    ended = finish(stores, 0, 1)
    assert ended[0].num_bytes == PAGE_BYTES and ended[1].num_bytes == 0
    assert on_disk(store, keys) == [pool.block(5), None]


def test_copies_between_steps_prove_those_of_before_and_errors_are_raised(store, pool, monkeypatch):
    stores = made(store, pool, batch_steps=0)
    for number, name in enumerate("ab"):
        stores.add(number, "r", keys_of(name), [3 + number])
    step(stores, num_left=9)
    stores.add(2, "r", keys_of("c"), [5])

    def fail():
        raise RuntimeError("the device failed")

    with monkeypatch.context() as patch:
        patch.setattr(module.errors, "wait", fail)
        with pytest.raises(RuntimeError, match="the device failed"):
            stores.copy_now()
    assert finish(stores, 2)[2].num_bytes == 0
    assert on_disk(store, keys_of("abc")) == [None] * 3
    stores.add(3, "r", keys_of("d"), [6])
    stores.copy_now()
    finish(stores, 0, 1, 3)
    expected = [pool.block(3), pool.block(4), None, pool.block(6)]
    assert on_disk(store, keys_of("abcd")) == expected


def test_a_page_waits_for_so_many_steps_at_most(store, pool):
    stores = made(store, pool, batch_steps=5)
    stores.add(0, "r", keys_of("a"), [5])
    assert [step(stores) for _ in range(6)] == [0, 0, 0, 0, 0, 1]
    finish(stores, 0)


def test_a_disk_that_hangs_holds_up_nobody_and_costs_bounded_memory(store, pool, blocked):
    stores = made(store, pool, batch_steps=0)
    for number in range(10):
        stores.add(number, "r", keys_of([number]), [1 + number])
        step(stores)
        assert stores.staged_bytes <= 4 * PAGE_BYTES
    stores.copy_now({7, 8})  # their blocks are about to be others'
    assert store.metrics()[TRANSFERS] == {"num_dropped": 2}
    assert {job.job_id for job in stores.finished()} == {7, 8}
    blocked.set()
    deadline = time.monotonic() + 60
    while stores.busy:
        assert time.monotonic() < deadline
        step(stores)
        stores.finished()


def test_a_page_larger_than_the_staging_goes_alone(store, pool):
    stores = StoreJobs(store, 4, PAGE_BYTES // 2)
    stores.use(pool.pages)
    keys = keys_of("ab")
    stores.add(0, "r", keys, [5, 3])
    stores.copy_now()
    assert stores.staged_bytes == PAGE_BYTES
    stores.drain(60)
    finish(stores, 0)
    assert on_disk(store, keys) == [pool.block(5), pool.block(3)]


def test_flushed_blocks_are_copied_before_they_are_anybody_else_s(stores, store, pool):
    keys, later = keys_of("ab"), keys_of("c")
    stores.add(0, "r", keys, [5, 3])
    stores.add(1, "s", later, [7])
    before = [pool.block(5), pool.block(3)]
    stores.copy_now({0})
    pool.fill(5, 1.0)
    pool.fill(3, 2.0)
    finish(stores, 0)
    assert on_disk(store, keys) == before
    assert on_disk(store, later) == [None] and stores.busy


def test_blocks_with_nan_or_infinity_are_not_kept(stores, store, pool):
    pool.fill(3, float("nan"))
    pool.fill(4, float("inf"))
    keys = keys_of("abcd")
    stores.add(0, "r", keys, [3, 5, 4, 6])
    stores.copy_now()
    assert finish(stores, 0)[0].num_bytes == 2 * PAGE_BYTES
    assert on_disk(store, keys) == [None, pool.block(5), None, pool.block(6)]


def test_each_page_is_written_once(stores, store):
    ended = {}
    for job_id in range(3):
        stores.add(job_id, "r", keys_of("ab"), [5, 3])
        stores.copy_now()
        ended |= finish(stores, job_id)
    assert [ended[job].num_bytes for job in range(3)] == [2 * PAGE_BYTES, 0, 0]
    assert store.stores["disk"].metrics().num_written == 2


def test_what_has_no_place_and_what_is_void_is_not_kept(stores, store, pool):
    stores.add(0, "r", keys_of("a", namespace=None), [5])
    stores.add(1, "s", keys_of("b"), [3])
    stores.add(2, "t", keys_of("c"), [4])
    stores.drop_requests({"s"})
    stores.copy_now()
    finish(stores, 0, 1, 2)
    assert on_disk(store, keys_of("abc")) == [None, None, pool.block(4)]


@pytest.mark.parametrize("method", ["queue_export", "export"])
def test_jobs_end_though_their_blocks_cannot_be_copied(store, pool, monkeypatch, method):
    def fail(group, blocks_np):
        raise RuntimeError("the device failed")

    monkeypatch.setattr(pool.pages, method, fail)
    stores = made(store, pool, batch_steps=0)
    stores.add(0, "r", keys_of("a"), [5])
    stores.add(1, "s", keys_of("b", group=1), [3])
    with pytest.raises(RuntimeError):
        stores.queue_batch() if method == "queue_export" else stores.copy_now()
    stores.drop_pool()
    assert {job.job_id for job in stores.finished()} == {0, 1} and not stores.busy


class Machine:
    """Random work; `ended` counts reports of each job."""

    def __init__(self, store):
        self.stores = StoreJobs(store, 4, 3 * PAGE_BYTES, batch_steps=1)
        self.pool = SmallPool()
        self.stores.use(self.pool.pages)
        self.added, self.ended = [], []

    def do(self, action, number):
        stores = self.stores
        if action == "add":
            job_id = len(self.added)
            self.added.append(job_id)
            names = [f"{number}.{index}" for index in range(number % 4)]
            namespace = None if number % 5 == 0 else "shared"
            keys = keys_of(names, namespace, group=number % 2)
            stores.add(job_id, f"r{number % 3}", keys, range(1, 1 + len(names)))
        elif action == "step":
            step(stores, num_left=number % 3)
        elif action == "fails":
            stores.queue_batch()
            stores.drop_pool()
            stores.use(self.pool.pages)
            stores.step_submitted()
            stores.end_step()
        elif action == "export fails":
            export, self.pool.pages.queue_export = self.pool.pages.queue_export, None
            try:
                stores.queue_batch()
            except TypeError:
                stores.drop_pool()
                stores.use(self.pool.pages)
            self.pool.pages.queue_export = export
            stores.step_submitted()
        elif action == "flush":
            stores.copy_now(set(range(number)))
        elif action == "void":
            stores.drop_requests({f"r{number % 3}"})
        elif action == "sleep":
            stores.drain(5)
            stores.drop_pool()
            stores.use(self.pool.pages)
        self.ended += [job.job_id for job in stores.finished()]
        assert 0 <= stores.staged_bytes <= 3 * PAGE_BYTES


ACTIONS = ["add", "add", "step", "step", "fails", "export fails", "flush", "void", "sleep"]


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 30)), max_size=30))
@settings(max_examples=20)
def test_whatever_happens_each_job_ends_once_and_no_memory_is_held(tmp_path_factory, actions):
    store = store_on(tmp_path_factory.mktemp("cache"))
    try:
        machine = Machine(store)
        for action, number in actions:
            machine.do(action, number)
        machine.stores.drain(60)
        machine.do("step", 0)
        assert sorted(machine.ended) == machine.added
        assert not machine.stores.busy and machine.stores.staged_bytes == 0
    finally:
        store.close()


def test_closing_does_not_wait_for_what_is_queued(tmp_path, pool, blocked):
    store = store_on(tmp_path / "cache")
    stores = StoreJobs(store, 4, 100 * PAGE_BYTES)
    stores.use(pool.pages)
    for number in range(5):
        stores.add(number, "r", keys_of([number]), [1 + number])
        stores.copy_now()
    stores.drop_pool()
    store.writer.submit(lambda: None)
    blocked.set()
    store.close()
    written = [content for content in on_disk(store, keys_of(range(5))) if content is not None]
    assert len(written) <= 5 and all(np.frombuffer(c, np.float32).any() for c in written)


def test_what_others_wait_for_goes_first_and_with_the_step_at_hand(tmp_path, pool):
    """It goes to peers alone; a page left out of its step is never copied."""
    disk = DiskStore(tmp_path / "cache", Limits(10**8, None))
    peers = PeerStore("one", None, b"", 10**6, shares_pool=True)
    store = PageStore({"disk": disk, "peer": peers})
    store.use(CONTENT)
    stores = made(store, pool)
    stores.add(0, "r", keys_of("ab"), [5, 3])
    wanted = dict(zip(keys_of("cd").keys, [7, 8], strict=True))
    assert stores.room(10 * PAGE_BYTES) == 4 * PAGE_BYTES
    stores.add_urgent(-1, wanted)
    assert step(stores, num_left=1) == 4
    assert stores.room(10 * PAGE_BYTES) == 0
    stores.steps_computed(0)
    finish(stores, -1, 0)
    assert on_disk(store, keys_of("abcd")) == [pool.block(5), pool.block(3), None, None]
    found = [bytes(peers.export_cache.get(key).data) for key in wanted]
    assert found == [pool.block(block) for block in (7, 8)]
    assert not any(peers.export_cache.contains(key) for key in keys_of("ab").keys)
    stores.add_urgent(-2, dict(zip(keys_of("e").keys, [9], strict=True)))
    stores.drop_urgent()
    assert finish(stores, -2)[-2].num_bytes == 0
    assert step(stores) == 0 and not stores.busy
    stale = store.namespace(None)
    store.use(PoolContent(Fingerprint("cd34", {"model": "other"}), CONTENT.page_bytes))
    assert not store.write_shared(stale, keys_of("c").keys[0], np.zeros(PAGE_BYTES, np.uint8), 1e9)
    store.close()


def test_a_page_that_is_larger_than_staging_leaves_alone(store, pool):
    stores = StoreJobs(store, 4, PAGE_BYTES // 2)
    stores.use(pool.pages)
    assert stores.room(1) == PAGE_BYTES
