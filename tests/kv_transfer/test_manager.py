# SPDX-License-Identifier: Apache-2.0
"""The scheduler's view of the disk: found pages, and pages worth writing."""

import os
import threading
from dataclasses import replace
from threading import Event

import pytest
from kv_transfer.small_pool import CONTENT, PAGE_BYTES, folder_of, keys_of, store_on
from vllm.v1.kv_offload.base import LookupResult, OffloadPolicy, ReqContext
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from vllm_metal.identity.fingerprint import Fingerprint
from vllm_metal.kv_transfer.disk.limits import Limits
from vllm_metal.kv_transfer.disk.space import WriteResult
from vllm_metal.kv_transfer.disk.view import DiskView
from vllm_metal.kv_transfer.manager import MAX_FAILED_LOADS, PageManager
from vllm_metal.kv_transfer.messages import TransferUpdate
from vllm_metal.kv_transfer.page_store import TRANSFERS
from vllm_metal.kv_transfer.store import Lookup, View
from vllm_metal.settings import salts

KEY = b"k" * 16
PAGE = memoryview(bytes(PAGE_BYTES))
MISS, HIT = LookupResult.MISS, LookupResult.HIT


@pytest.fixture
def view(tmp_path):
    made = DiskView(tmp_path / "cache", CONTENT)
    yield made
    made.close()


@pytest.fixture
def manager(view):
    made = PageManager(clock=lambda: 2e9)
    made.open({"disk": view}, KEY)
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
        assert folder_of(store, namespace).write(key, PAGE, 1e9, 0) is WriteResult.STORED


def found(manager, key, context):
    """Returns the answer to vLLM's scheduler, once the stores have been asked for the request."""
    assert manager.lookups_done(lambda: [key], context)
    return manager.lookup(key, context)


def exchange(manager, store):
    """Exchanges a step's messages both ways; returns the worker's."""
    discards, uses = manager.take_messages()
    for discard in discards:
        store.discard(discard)
    for use in uses:
        store.touch(use)
    store.writer.submit(lambda: None).result()
    update = TransferUpdate()
    store.add_messages(update)
    manager.update(update)
    return update


def stored(manager, keys, context):
    return manager.prepare_store(keys, context).keys_to_store


def test_nothing_is_found_or_stored_before_the_worker_has_a_store(store, view):
    manager, keys = PageManager(), keys_of("a").keys
    write(store, keys)
    context = request(manager)
    assert found(manager, keys[0], context) is MISS
    assert stored(manager, keys, context) == []
    manager.open({"disk": view}, None)
    assert found(manager, keys[0], context) is HIT
    assert manager.get_load_source(keys[0], context) is CacheHitSource.DISK


@pytest.mark.parametrize("closed", [False, True])
def test_a_view_lists_its_folder_until_it_is_closed(store, view, closed):
    (key,) = keys_of("a").keys
    write(store, [key])
    if closed:
        view.close()
    lookup = view.look_up("shared", list, None)
    listing = lookup.listing()
    for thread in threading.enumerate():
        if thread.name == "prefix-cache-list":
            thread.join()
    assert listing.is_listed(key) is not closed and lookup.contains(key)


def test_a_salt_of_a_client_s_own_finds_nothing_and_leaves_nothing(manager, store):
    keys = keys_of("ab").keys
    write(store, keys[:1])
    context = request(manager, salt="the client's")
    assert found(manager, keys[0], context) is MISS
    assert stored(manager, keys, context) == []
    assert manager.prepare_store(keys, context).store_spec.namespace is None


def test_a_tenant_has_a_folder_of_its_own(manager, store):
    keys, salt = keys_of("a").keys, salts.derive(KEY, "one")
    ours = request(manager, "r", salt)
    others = request(manager, "s", salts.derive(KEY, "two"))
    nobodys = request(manager, "t")
    write(store, keys, salts.namespace(KEY, salt))
    answers = [found(manager, keys[0], context) for context in (ours, others, nobodys)]
    assert answers == [HIT, MISS, MISS]


def test_a_request_that_was_not_announced_has_no_place(manager, store):
    keys = keys_of("a").keys
    write(store, keys)
    assert found(manager, keys[0], ReqContext("r")) is MISS
    assert stored(manager, keys, ReqContext("r")) == []


def test_a_page_is_asked_for_once_and_is_no_hit_while_it_is_written(manager, store):
    keys = keys_of("abc").keys
    write(store, keys[:1])
    context, other = request(manager, "r", keys=keys), request(manager, "s")
    spec = manager.prepare_store(keys, context).store_spec
    assert spec.keys == keys[1:] and spec.ends == [8, 12] and spec.used_at == 2e9
    assert stored(manager, keys, other) == []
    write(store, keys[1:2])  # and not reported yet
    assert [found(manager, key, other) for key in keys] == [HIT, MISS, MISS]
    manager.complete_store(keys[1:], context)
    assert [found(manager, key, other) for key in keys] == [HIT, HIT, MISS]
    assert stored(manager, keys, other) == keys[2:]


def test_a_day_s_writes_stop_and_go_on_the_next_day_while_reads_go_on(tmp_path, manager):
    now = [1.7e9]
    limits = Limits(10**8, daily_write_bytes=3 * 4096)  # a manifest and two pages
    store = store_on(tmp_path / "cache", limits, clock=lambda: now[0])
    context, keys = request(manager), keys_of("abcd").keys
    outcomes = [folder_of(store).write(key, PAGE, 1e9, 0) for key in keys]
    num_stored = outcomes.count(WriteResult.STORED)
    assert 0 < num_stored < 4 and set(outcomes[num_stored:]) == {WriteResult.OVER_BUDGET}
    shared = store.namespace("shared")  # no step copies what nobody would write
    assert not any(store.wants(shared, key) for key in keys)
    assert found(manager, keys[0], context) is HIT
    assert folder_of(store).read(keys[0], memoryview(bytearray(PAGE_BYTES)))
    now[0] += 2 * 86400
    assert [store.wants(shared, key) for key in keys] == [False] * num_stored + [True] * (
        4 - num_stored
    )
    assert stored(manager, keys, context) == keys[num_stored:]
    assert folder_of(store).write(keys[-1], PAGE, 1e9, 0) is WriteResult.STORED
    store.close()


def test_pages_are_touched_from_the_first_on_so_that_the_last_go_first(manager, store, tmp_path):
    keys = keys_of("abcd").keys
    write(store, keys)
    manager.touch_prefix(keys, request(manager, keys=keys))
    exchange(manager, store)
    times = []
    for key in keys:
        (path,) = (tmp_path / "cache").glob(f"*/shared/*/{key.hex()}.kv")
        times.append(os.stat(path).st_mtime_ns)
    assert times[0] == 2 * 10**18 and times == sorted(times, reverse=True)
    assert len(set(times)) == 4


def test_what_the_writer_is_given_is_done_in_order(manager, store):
    keys = keys_of("a").keys
    go = Event()
    store.writer.submit(go.wait, 120)
    store.writer.submit(write, store, keys)
    manager.discard(None, keys)
    (discard,), _ = manager.take_messages()
    store.discard(discard)
    go.set()
    store.writer.submit(lambda: None).result()
    assert not folder_of(store).contains(keys[0])


def test_discarded_pages_are_missed_until_they_are_gone(manager, store):
    keys = keys_of("ab").keys
    write(store, keys)
    context = request(manager)
    assert [found(manager, key, context) for key in keys] == [HIT, HIT]
    manager.discard(None, keys[:1])
    assert [found(manager, key, context) for key in keys] == [MISS, HIT]
    assert exchange(manager, store).discarded == [0]
    assert [found(manager, key, context) for key in keys] == [MISS, HIT]
    write(store, keys[:1])  # computed anew
    assert [found(manager, key, context) for key in keys] == [HIT, HIT]


def test_blocks_that_the_worker_loses_are_missed_once_it_has_told(manager, store, tmp_path):
    """It notices when it reads one, or removes it to make room."""
    keys = keys_of("abc").keys
    write(store, keys)
    context = request(manager)
    assert [found(manager, key, context) for key in keys] == [HIT] * 3
    (path,) = (tmp_path / "cache").glob(f"*/shared/*/{keys[1].hex()}.kv")
    path.unlink()
    assert found(manager, keys[1], context) is HIT  # nobody knows
    assert not folder_of(store).read(keys[1], memoryview(bytearray(PAGE_BYTES)))
    folder_of(store).discard(keys[2:])
    exchange(manager, store)
    assert [found(manager, key, context) for key in keys] == [HIT, MISS, MISS]


def test_after_other_weights_were_loaded_pages_are_others(manager, store):
    keys = keys_of("a").keys
    write(store, keys)
    context = request(manager)
    assert found(manager, keys[0], context) is HIT
    other = replace(CONTENT, fingerprint=Fingerprint("cd34", {"model": "test"}))
    assert store.use(other) and not store.use(other)
    manager.update(TransferUpdate(content=other))
    context = request(manager, "s")
    assert found(manager, keys[0], context) is MISS
    write(store, keys)
    assert found(manager, keys[0], context) is HIT


def test_after_some_failed_loads_a_request_finds_nothing_but_is_still_stored(manager, store):
    keys = keys_of("ab").keys
    write(store, keys[:1])
    context = request(manager)
    for _ in range(MAX_FAILED_LOADS):
        assert found(manager, keys[0], context) is HIT
        manager.load_failed(context)
    assert found(manager, keys[0], context) is MISS
    assert found(manager, keys[0], request(manager, "s")) is HIT
    assert stored(manager, keys, context) == keys[1:]


class Leases(View):
    """A store that leases every found page until the lookup is released."""

    def __init__(self):
        self.held = []

    def look_up(self, namespace, keys, params):
        self.held.append(Leased(self.held))
        return self.held[-1]


class Leased(Lookup):
    def __init__(self, held):
        self._held = held

    def release(self, failed):
        self._held.remove(self)
        return Lookup() if failed else None


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda manager, context: manager.complete_load([], context), id="loaded"),
        pytest.param(PageManager.load_failed, id="failed"),
        pytest.param(PageManager.release_lookups, id="loads-nothing"),
        pytest.param(PageManager.on_request_finished, id="ended-before-it-began"),
    ],
)
def test_a_store_keeps_what_it_found_no_longer_than_the_request_needs_it(end):
    manager, store = PageManager(), Leases()
    manager.open({"leases": store}, None)
    context = request(manager)
    found(manager, b"a", context)
    assert len(store.held) == 1
    end(manager, context)
    assert store.held == []
    manager.on_request_finished(context)  # of all requests, released before or not


def test_the_figures_are_told_as_they_change(store):
    keys = keys_of("ab").keys
    write(store, keys)
    store.count_dropped(3)
    first = store.metrics()
    assert store.metrics() == {}  # nothing has changed
    store.count_dropped(1)
    assert store.metrics() == {TRANSFERS: {"num_dropped": 4}}
    assert first["disk"]["written_bytes"] > 2 * PAGE_BYTES and first["disk"]["max_bytes"] == 10**8
    assert first[TRANSFERS] == {"num_dropped": 3}
