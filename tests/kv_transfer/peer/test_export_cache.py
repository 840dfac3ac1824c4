# SPDX-License-Identifier: Apache-2.0
"""The send cache against a naive one, its limits, and waits for pages."""

import random
import threading

import blake3
import pytest
from kv_transfer.peer.engines import fill, make_pages

from vllm_metal.kv_transfer.peer.export_cache import ExportCache


class Naive:
    """Keeps pages in order of their last use, and recalculates everything else."""

    def __init__(self, most):
        self.most = most
        self.pages = []  # [key, data, {holder: end}, when it was first leased]
        self.now = 0.0
        self.tick = self.evicted = self.refused = 0

    def held(self, leased=False):
        return sum(len(page[1]) for page in self.pages if page[2] or not leased)

    def find(self, key):
        return next((page for page in self.pages if page[0] == key), None)

    def use(self, page):
        self.pages.remove(page)
        self.pages.append(page)

    def end(self, page, holder):
        del page[2][holder]
        if not page[2]:
            self.use(page)

    def pass_time(self):
        over = [(end, p[3], p, h) for p in self.pages for h, end in p[2].items() if end <= self.now]
        for _, _, page, holder in sorted(over, key=lambda each: each[:2]):
            self.end(page, holder)

    def put(self, key, data):
        self.pass_time()
        if (page := self.find(key)) is not None:
            self.use(page)
            return True
        if len(data) > self.most - self.held(leased=True):
            self.refused += 1
            return False
        while self.held() + len(data) > self.most:
            self.pages.remove(next(page for page in self.pages if not page[2]))
            self.evicted += 1
        self.pages.append([key, data, {}, 0])
        return True

    def get(self, key):
        self.pass_time()
        if (page := self.find(key)) is None:
            return None
        self.use(page)
        return page[1]

    def lease(self, holder, keys, seconds):
        self.pass_time()
        count = 0
        for key in keys:
            if (page := self.find(key)) is None:
                continue
            self.use(page)
            if not page[2]:
                if self.held(leased=True) + len(page[1]) > self.most * 3 // 4:
                    continue
                self.tick += 1
                page[3] = self.tick
            page[2][holder] = max(page[2].get(holder, 0), self.now + seconds)
            count += 1
        return count

    def renew(self, holder, seconds):
        self.pass_time()
        for page in self.pages:
            if holder in page[2]:
                page[2][holder] = max(page[2][holder], self.now + seconds)

    def release(self, holder, keys):
        self.pass_time()
        for key in keys:
            if (page := self.find(key)) is not None and holder in page[2]:
                self.end(page, holder)

    def discard(self, keys):
        self.pages = [page for page in self.pages if page[0] not in keys]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.more) for seed in range(2, 12))]
)
def test_an_outbox_does_what_a_naive_one_does(seed, clock):
    rng = random.Random(seed)
    most = rng.choice([1000, 4000, 20000])
    export_cache, naive = ExportCache(most, clock), Naive(most)
    start = clock.now
    keys = [rng.randbytes(rng.choice([1, 36, 64])) + bytes([i]) for i in range(40)]
    data = [rng.randbytes(rng.choice([0, 1, 100, 700, 1000, 4001])) for _ in keys]
    for _ in range(1500):
        number = rng.randrange(len(keys))
        some = rng.sample(keys, rng.randrange(8))
        holder, seconds = rng.randrange(3), rng.choice([1.0, 5.0, 30.0])
        match rng.choice("ppppggggllrxdt"):
            case "p":
                page = memoryview(data[number])
                assert export_cache.put(keys[number], page) == naive.put(keys[number], data[number])
            case "g":
                page, expected = export_cache.get(keys[number]), naive.get(keys[number])
                assert (page and bytes(page.data)) == expected or expected == b""
            case "l":
                assert export_cache.lease(holder, some, seconds) == naive.lease(
                    holder, some, seconds
                )
            case "r":
                export_cache.renew(holder, seconds)
                naive.renew(holder, seconds)
            case "x":
                export_cache.release(holder, some)
                naive.release(holder, some)
            case "d":
                export_cache.discard(some[:1])
                naive.discard(some[:1])
            case "t":
                clock.now += rng.choice([0.5, 4.0, 29.0])
                naive.now = clock.now - start
        naive.pass_time()
        stats = export_cache.stats()
        assert stats.outbox_bytes == naive.held() <= stats.outbox_limit_bytes == most
        assert stats.leased_bytes == naive.held(leased=True) <= most * 3 // 4
        assert stats.num_evicted == naive.evicted and stats.num_refused == naive.refused
        there = [page[0] for page in naive.pages]
        assert stats.pages == len(there)
        assert [key for key in keys if export_cache.contains(key)] == [
            k for k in keys if k in there
        ]
    assert naive.evicted > 10


def test_a_checksum_is_of_page_and_key(export_cache):
    export_cache.put(b"key", memoryview(b"data"))
    expected = blake3.blake3(b"datakey").digest()[:16]
    assert export_cache.get(b"key").checksum == expected


def test_a_page_is_a_copy_and_outlives_its_eviction(clock):
    export_cache = ExportCache(10, clock)
    source = bytearray(b"0123456789")
    export_cache.put(b"a", memoryview(source))
    held = export_cache.get(b"a")
    source[:] = b"x" * 10
    export_cache.put(b"b", memoryview(source))
    assert not export_cache.contains(b"a") and bytes(held.data) == b"0123456789"
    with pytest.raises(TypeError):
        held.data[0] = 1


def test_leases_end_by_the_clock_and_by_renewals(clock):
    export_cache = ExportCache(40, clock)
    fill(export_cache, {b"a": b"a" * 10, b"b": b"b" * 10, b"c": b"c" * 10, b"d": b"d" * 10})
    assert export_cache.lease(7, [b"a", b"b", b"c", b"d"], 30) == 3  # three quarters
    assert export_cache.put(b"e", memoryview(b"e" * 10)) and not export_cache.contains(b"d")
    assert not export_cache.put(b"f", memoryview(b"f" * 11))
    clock.now += 20
    export_cache.renew(7, 30)
    export_cache.release(7, [b"b", b"d", b"none"])
    clock.now += 29
    assert export_cache.put(b"f", memoryview(b"f" * 20))  # in place of b and e
    assert [export_cache.contains(key) for key in (b"a", b"b", b"c", b"e")] == [
        True,
        False,
        True,
        False,
    ]
    clock.now += 1
    assert export_cache.stats().leased_bytes == 0
    assert export_cache.put(b"g", memoryview(b"g" * 40)) and export_cache.stats().pages == 1
    export_cache.renew(7, 30)  # of nothing
    export_cache.release(8, None)


def test_waiting_ends_when_all_is_settled(export_cache):
    export_cache.expect([b"a", b"b", b"c"])
    export_cache.expect([b"a"])  # two requests make it
    found, begun = [], threading.Event()

    def wait():
        begun.set()
        found.extend(export_cache.await_pages([b"c", b"a", b"x"], 30))

    waiter = threading.Thread(target=wait)
    waiter.start()
    begun.wait()
    export_cache.put(b"a", memoryview(b"page"))
    export_cache.expect_no_more([b"a"])
    assert export_cache.any_expected([b"a"]) and waiter.is_alive()
    export_cache.expect_no_more([b"c"])  # it will not come
    waiter.join(0.05)
    assert waiter.is_alive()
    export_cache.expect_no_more([b"a"])
    waiter.join()
    assert found == [b"a"]
    assert export_cache.any_expected([b"b"]) and not export_cache.any_expected([b"a", b"c"])
    export_cache.expect_no_more([b"a", b"a", b"b"])
    export_cache.expect([b"a"])
    assert export_cache.any_expected([b"a"])  # settling too often does not count ahead


def test_waiting_ends_by_time_and_by_clearing(export_cache):
    export_cache.expect([b"a"])
    export_cache.put(b"b", memoryview(b"page"))
    assert export_cache.await_pages([b"a", b"b"], 0.01) == [b"b"]
    waiter = threading.Thread(target=export_cache.await_pages, args=([b"a"], 30))
    waiter.start()
    export_cache.clear()
    waiter.join()
    assert export_cache.stats().pages == 0 and not export_cache.any_expected([b"a"])


@pytest.mark.parametrize("end", ["discard", "clear"])
def test_what_is_discarded_while_it_is_copied_does_not_come(monkeypatch, export_cache, end):
    """A page of lost weights must not appear after them."""
    from vllm_metal.kv_transfer.peer import export_cache as module

    original = module.checksum

    def interrupted(key, data):
        export_cache.discard([key]) if end == "discard" else export_cache.clear()
        return original(key, data)

    monkeypatch.setattr(module, "checksum", interrupted)
    assert not export_cache.put(b"a", memoryview(b"page"))
    assert not export_cache.contains(b"a") and export_cache.stats().outbox_bytes == 0
    monkeypatch.undo()
    assert export_cache.put(b"a", memoryview(b"page"))


def test_a_copy_that_fails_takes_no_room(monkeypatch, export_cache):
    from vllm_metal.kv_transfer.peer import export_cache as module

    def fails(key, data):
        raise MemoryError

    monkeypatch.setattr(module, "checksum", fails)
    with pytest.raises(MemoryError):
        export_cache.put(b"a", memoryview(b"page"))
    assert export_cache.stats().outbox_bytes == 0 and not export_cache.contains(b"a")


def test_threads_together_keep_the_limit():
    export_cache = ExportCache(64 << 10)
    pages = make_pages(64, 4096)
    keys = list(pages)
    errors = []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(400):
                key = rng.choice(keys)
                export_cache.put(key, memoryview(pages[key]))
                export_cache.lease(seed, rng.sample(keys, 5), 0.0005)
                if (page := export_cache.get(key)) is not None and bytes(page.data) != pages[key]:
                    errors.append("other bytes")
                if export_cache.stats().outbox_bytes > 64 << 10:
                    errors.append("too many bytes")
                export_cache.release(seed, None)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert export_cache.stats().leased_bytes == 0 and export_cache.stats().outbox_bytes == 64 << 10
