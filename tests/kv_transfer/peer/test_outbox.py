# SPDX-License-Identifier: Apache-2.0
"""The outbox beside a naive one, its limits, and who waits for pages."""

import random
import threading

import blake3
import pytest
from kv_transfer.peer.engines import fill, make_pages

from vllm_metal.kv_transfer.peer.outbox import Outbox


class Naive:
    """Pages in order of their last use; nothing is remembered that can be counted."""

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
    outbox, naive = Outbox(most, clock), Naive(most)
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
                assert outbox.put(keys[number], page) == naive.put(keys[number], data[number])
            case "g":
                page, expected = outbox.get(keys[number]), naive.get(keys[number])
                assert (page and bytes(page.data)) == expected or expected == b""
            case "l":
                assert outbox.lease(holder, some, seconds) == naive.lease(holder, some, seconds)
            case "r":
                outbox.renew(holder, seconds)
                naive.renew(holder, seconds)
            case "x":
                outbox.release(holder, some)
                naive.release(holder, some)
            case "d":
                outbox.discard(some[:1])
                naive.discard(some[:1])
            case "t":
                clock.now += rng.choice([0.5, 4.0, 29.0])
                naive.now = clock.now - start
        naive.pass_time()
        stats = outbox.stats()
        assert stats.outbox_bytes == naive.held() <= stats.outbox_limit_bytes == most
        assert stats.leased_bytes == naive.held(leased=True) <= most * 3 // 4
        assert stats.num_evicted == naive.evicted and stats.num_refused == naive.refused
        there = [page[0] for page in naive.pages]
        assert stats.pages == len(there)
        assert [key for key in keys if outbox.contains(key)] == [k for k in keys if k in there]
    assert naive.evicted > 10


def test_a_checksum_is_of_page_and_key(outbox):
    outbox.put(b"key", memoryview(b"data"))
    expected = blake3.blake3(b"datakey").digest()[:16]
    assert outbox.get(b"key").checksum == expected


def test_a_page_is_a_copy_and_outlives_its_eviction(clock):
    outbox = Outbox(10, clock)
    source = bytearray(b"0123456789")
    outbox.put(b"a", memoryview(source))
    held = outbox.get(b"a")
    source[:] = b"x" * 10
    outbox.put(b"b", memoryview(source))
    assert not outbox.contains(b"a") and bytes(held.data) == b"0123456789"
    with pytest.raises(TypeError):
        held.data[0] = 1


def test_leases_end_by_the_clock_and_by_renewals(clock):
    outbox = Outbox(40, clock)
    fill(outbox, {b"a": b"a" * 10, b"b": b"b" * 10, b"c": b"c" * 10, b"d": b"d" * 10})
    assert outbox.lease(7, [b"a", b"b", b"c", b"d"], 30) == 3  # three quarters
    assert outbox.put(b"e", memoryview(b"e" * 10)) and not outbox.contains(b"d")
    assert not outbox.put(b"f", memoryview(b"f" * 11))
    clock.now += 20
    outbox.renew(7, 30)
    outbox.release(7, [b"b", b"d", b"none"])
    clock.now += 29
    assert outbox.put(b"f", memoryview(b"f" * 20))  # in place of b and e
    assert [outbox.contains(key) for key in (b"a", b"b", b"c", b"e")] == [True, False, True, False]
    clock.now += 1
    assert outbox.stats().leased_bytes == 0
    assert outbox.put(b"g", memoryview(b"g" * 40)) and outbox.stats().pages == 1
    outbox.renew(7, 30)  # of nothing
    outbox.release(8, None)


def test_waiting_ends_when_all_is_settled(outbox):
    outbox.expect([b"a", b"b", b"c"])
    outbox.expect([b"a"])  # two requests make it
    found, begun = [], threading.Event()

    def wait():
        begun.set()
        found.extend(outbox.await_pages([b"c", b"a", b"x"], 30))

    waiter = threading.Thread(target=wait)
    waiter.start()
    begun.wait()
    outbox.put(b"a", memoryview(b"page"))
    outbox.expect_no_more([b"a"])
    assert outbox.any_expected([b"a"]) and waiter.is_alive()
    outbox.expect_no_more([b"c"])  # it will not come
    waiter.join(0.05)
    assert waiter.is_alive()
    outbox.expect_no_more([b"a"])
    waiter.join()
    assert found == [b"a"]
    assert outbox.any_expected([b"b"]) and not outbox.any_expected([b"a", b"c"])
    outbox.expect_no_more([b"a", b"a", b"b"])
    outbox.expect([b"a"])
    assert outbox.any_expected([b"a"])  # settling too often does not count ahead


def test_waiting_ends_by_time_and_by_clearing(outbox):
    outbox.expect([b"a"])
    outbox.put(b"b", memoryview(b"page"))
    assert outbox.await_pages([b"a", b"b"], 0.01) == [b"b"]
    waiter = threading.Thread(target=outbox.await_pages, args=([b"a"], 30))
    waiter.start()
    outbox.clear()
    waiter.join()
    assert outbox.stats().pages == 0 and not outbox.any_expected([b"a"])


@pytest.mark.parametrize("end", ["discard", "clear"])
def test_what_is_discarded_while_it_is_copied_does_not_come(monkeypatch, outbox, end):
    """A page of lost weights must not appear after them."""
    from vllm_metal.kv_transfer.peer import outbox as module

    original = module.checksum

    def interrupted(key, data):
        outbox.discard([key]) if end == "discard" else outbox.clear()
        return original(key, data)

    monkeypatch.setattr(module, "checksum", interrupted)
    assert not outbox.put(b"a", memoryview(b"page"))
    assert not outbox.contains(b"a") and outbox.stats().outbox_bytes == 0
    monkeypatch.undo()
    assert outbox.put(b"a", memoryview(b"page"))


def test_a_copy_that_fails_takes_no_room(monkeypatch, outbox):
    from vllm_metal.kv_transfer.peer import outbox as module

    def fails(key, data):
        raise MemoryError

    monkeypatch.setattr(module, "checksum", fails)
    with pytest.raises(MemoryError):
        outbox.put(b"a", memoryview(b"page"))
    assert outbox.stats().outbox_bytes == 0 and not outbox.contains(b"a")


def test_threads_together_keep_the_limit():
    outbox = Outbox(64 << 10)
    pages = make_pages(64, 4096)
    keys = list(pages)
    errors = []

    def work(seed):
        rng = random.Random(seed)
        try:
            for _ in range(400):
                key = rng.choice(keys)
                outbox.put(key, memoryview(pages[key]))
                outbox.lease(seed, rng.sample(keys, 5), 0.0005)
                if (page := outbox.get(key)) is not None and bytes(page.data) != pages[key]:
                    errors.append("other bytes")
                if outbox.stats().outbox_bytes > 64 << 10:
                    errors.append("too many bytes")
                outbox.release(seed, None)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert outbox.stats().leased_bytes == 0 and outbox.stats().outbox_bytes == 64 << 10
