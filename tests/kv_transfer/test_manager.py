# SPDX-License-Identifier: Apache-2.0
"""What the scheduler is told of the disk: whose pages are found, and which are worth writing."""

import os
import time
from threading import Event

import pytest
from kv_transfer.small_pool import PAGE_BYTES, keys_of, store_on
from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy, ReqContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.written import Written
from vllm_metal.kv_transfer.manager import MAX_FAILED_LOADS, PageManager
from vllm_metal.kv_transfer.messages import Discard
from vllm_metal.kv_transfer.metrics import DEFINITIONS
from vllm_metal.settings import salts

KEY = b"k" * 16
PAGE = memoryview(bytes(PAGE_BYTES))
MISS, HIT = LookupResult.MISS, LookupResult.HIT


@pytest.fixture
def store(tmp_path):
    made = store_on(tmp_path / "cache")
    yield made
    made.close()


@pytest.fixture
def manager(store):
    made = PageManager(KEY, clock=lambda: 2e9)
    made.open(store)
    return made


def request(manager, req_id="r", salt=None, keys=()):
    context = ReqContext(req_id)
    manager.note_salt(req_id, salt)
    assert manager.on_new_request(context).policy is OffloadPolicy.CHUNK_LEVEL
    for index, key in enumerate(keys):
        context.set_offload_key_position(key, 4 * (index + 1))
    return context


def write(store, keys, namespace="shared"):
    for key in keys:
        assert store.shelf(namespace).folder.write(key, PAGE, 1e9, 0) is Written.STORED


def stored(manager, keys, context):
    return manager.prepare_store(keys, context).keys_to_store


def test_nothing_is_found_or_stored_before_the_worker_has_a_store(store):
    manager, keys = PageManager(None), keys_of("a").keys
    write(store, keys)
    context = request(manager)
    assert manager.lookup(keys[0], context) is MISS
    assert stored(manager, keys, context) == [] and manager.get_stats() is None
    manager.touch_prefix(keys, context)
    manager.open(store)
    assert manager.lookup(keys[0], context) is HIT
    assert manager.get_load_source(keys[0], context) is CacheHitSource.DISK


def test_a_salt_of_a_client_s_own_finds_nothing_and_leaves_nothing(manager, store):
    keys = keys_of("ab").keys
    write(store, keys[:1])
    context = request(manager, salt="the client's")
    assert manager.lookup(keys[0], context) is MISS
    assert stored(manager, keys, context) == []
    assert manager.prepare_store(keys, context).store_spec.place.namespace is None


def test_a_tenant_has_a_folder_of_its_own(manager, store):
    keys, salt = keys_of("a").keys, salts.derive(KEY, "one")
    ours = request(manager, "r", salt)
    others = request(manager, "s", salts.derive(KEY, "two"))
    nobodys = request(manager, "t")
    write(store, keys, salts.namespace(KEY, salt))
    found = [manager.lookup(keys[0], context) for context in (ours, others, nobodys)]
    assert found == [HIT, MISS, MISS]


def test_a_request_that_was_not_announced_has_no_place(manager, store):
    keys = keys_of("a").keys
    write(store, keys)
    assert manager.lookup(keys[0], ReqContext("r")) is MISS
    assert stored(manager, keys, ReqContext("r")) == []


def test_a_page_is_asked_for_once_and_is_no_hit_while_it_is_written(manager, store):
    keys = keys_of("abc").keys
    write(store, keys[:1])
    context, other = request(manager, "r", keys=keys), request(manager, "s")
    spec = manager.prepare_store(keys, context).store_spec
    assert spec.keys == keys[1:] and spec.ends == [8, 12] and spec.place.used_at == 2e9
    assert stored(manager, keys, other) == []
    write(store, keys[1:2])  # and not reported yet
    assert [manager.lookup(key, other) for key in keys] == [HIT, MISS, MISS]
    manager.complete_store(keys[1:], context)
    assert [manager.lookup(key, other) for key in keys] == [HIT, HIT, MISS]
    assert stored(manager, keys, other) == keys[2:]


def test_a_day_s_writes_stop_and_go_on_the_next_day_while_reads_go_on(tmp_path):
    now = [time.time()]
    limits = Limits(10**8, daily_write_bytes=3 * 4096)  # a manifest and two pages
    store = store_on(tmp_path / "cache", limits, clock=lambda: now[0])
    manager = PageManager(None, clock=lambda: now[0])
    manager.open(store)
    context, keys = request(manager), keys_of("abcd").keys
    outcomes = [store.shelf("shared").folder.write(key, PAGE, 1e9, 0) for key in keys]
    num_stored = outcomes.count(Written.STORED)
    assert 0 < num_stored < 4 and set(outcomes[num_stored:]) == {Written.OVER_BUDGET}
    assert stored(manager, keys, context) == []  # so no step copies what nobody would write
    assert manager.lookup(keys[0], context) is HIT
    assert store.shelf("shared").folder.read(keys[0], memoryview(bytearray(PAGE_BYTES)))
    now[0] += 2 * 86400
    assert stored(manager, keys, context) == keys[num_stored:]
    assert store.shelf("shared").folder.write(keys[-1], PAGE, 1e9, 0) is Written.STORED
    store.close()


def test_pages_are_touched_from_the_first_on_so_that_the_last_go_first(manager, store):
    keys = keys_of("abcd").keys
    write(store, keys)
    manager.touch_prefix(keys, request(manager, keys=keys))
    store.writer.submit(lambda: None).result()
    times = []
    for key in keys:
        (path,) = store._disk._root.glob(f"*/shared/*/{key.hex()}.kv")
        times.append(os.stat(path).st_mtime_ns)
    assert times[0] == 2 * 10**18 and times == sorted(times, reverse=True)
    assert len(set(times)) == 4


def test_what_the_writer_is_given_is_done_in_order(manager, store):
    keys = keys_of("a").keys
    go = Event()
    store.writer.submit(go.wait, 20)
    store.writer.submit(write, store, keys)
    discard = Discard("shared", frozenset(keys))
    store.discard(discard)
    go.set()
    assert discard.done.wait(20)
    assert not store.shelf("shared").folder.contains(keys[0])


def test_distrusted_pages_are_missed_until_they_are_gone(manager, store):
    keys = keys_of("ab").keys
    write(store, keys)
    context, discard = request(manager), Discard("shared", frozenset(keys[:1]))
    manager.distrust(discard)
    assert [manager.lookup(key, context) for key in keys] == [MISS, HIT]
    store.discard(discard)
    assert discard.done.wait(20)
    write(store, keys[:1])  # computed anew
    assert [manager.lookup(key, context) for key in keys] == [HIT, HIT]


def test_after_some_failed_loads_a_request_finds_nothing_but_is_still_stored(manager, store):
    keys = keys_of("ab").keys
    write(store, keys[:1])
    context = request(manager)
    for _ in range(MAX_FAILED_LOADS):
        assert manager.lookup(keys[0], context) is HIT
        manager.load_failed(context)
    assert manager.lookup(keys[0], context) is MISS
    assert manager.lookup(keys[0], request(manager, "s")) is HIT
    assert stored(manager, keys, context) == keys[1:]


def test_the_figures_are_told_as_they_change(manager, store):
    keys = keys_of("ab").keys
    write(store, keys)
    store.count_dropped(3)
    first = manager.get_stats().reduce()
    assert manager.get_stats() is None  # nothing has changed
    store.count_dropped(1)
    second = manager.get_stats().reduce()
    name = "vllm:prefix_cache_disk_"
    assert first[name + "written_bytes"] > 2 * PAGE_BYTES and first[name + "dropped"] == 3
    assert name + "written_bytes" not in second and second[name + "dropped"] == 1
    assert first[name + "limit_bytes"] == 10**8
    assert first.keys() | second.keys() <= DEFINITIONS.keys()
