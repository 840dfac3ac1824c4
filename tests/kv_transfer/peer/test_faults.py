# SPDX-License-Identifier: Apache-2.0
"""Servers that die or hang, and connections that lose or change bytes."""

import signal
import threading
from contextlib import nullcontext

import pytest
from kv_transfer.peer.engines import QUICK, fill, make_pages, pull, wait_until

#: Bytes of a page, and of the messages before its own bytes are through; more than sockets buffer.
SIZE = 3 << 20


@pytest.mark.parametrize(
    "when", ["in", *(pytest.param(when, marks=pytest.mark.more) for when in ("before", "after"))]
)
def test_a_server_that_is_killed(start_engine, make_proxy, make_peer, clock, wire_clock, when):
    pages = make_pages(4, SIZE, seed=5)
    child = start_engine("serve", 5, 4, SIZE)
    port = int(child.stdout.readline())
    proxy = make_proxy(port)
    peer = make_peer(proxy.port)
    assert peer.lookup(pages) == set(pages)
    first = peer.engine_id
    if when == "in":
        proxy.arm(SIZE + SIZE // 2, "stall")
        results = []
        fetching = threading.Thread(target=lambda: results.append(pull(peer, pages)))
        fetching.start()
        proxy.happened.wait()
    elif when == "after":
        assert pull(peer, pages)
    child.send_signal(signal.SIGKILL)
    child.wait()
    if when == "in":
        while fetching.is_alive():
            wire_clock.skip()
            fetching.join(0.01)
        assert results == [False]
    else:
        assert not pull(peer, pages)
    clock.now += 60
    assert peer.lookup(pages) == set()
    assert peer.stats().fetched_pages == (4 if when == "after" else 0)
    clock.now += 60
    again = start_engine("serve", 5, 4, SIZE)
    restarted = make_peer(int(again.stdout.readline()))
    assert restarted.lookup(pages) == set(pages) and pull(restarted, pages)
    assert restarted.engine_id != first


@pytest.mark.parametrize(
    "after",
    [
        *(30, SIZE // 2),
        *(pytest.param(n, marks=pytest.mark.more) for n in (1, 3, SIZE + 20, 3 * SIZE)),
    ],
)
@pytest.mark.parametrize("fault", ["cut", "stall"])
def test_a_line_that_breaks_in_a_fetch(
    make_server, make_proxy, make_peer, export_cache, wire_clock, fault, after
):
    pages = make_pages(4, SIZE)
    fill(export_cache, pages)
    server = make_server()
    proxy = make_proxy(server.port)
    peer = make_peer(proxy.port)
    good = make_peer(server.port)
    assert peer.lookup(pages) and good.lookup(pages)
    proxy.arm(after, fault)
    with wire_clock.hurrying_after(proxy.happened) if fault == "stall" else nullcontext():
        assert not pull(peer, pages)
    assert proxy.happened.is_set()
    assert peer.is_down == (fault == "stall")
    assert pull(good, pages)
    assert peer.stats().fetched_pages == 0 and peer.stats().failed_fetches == 1


@pytest.mark.parametrize("fault", ["cut", "stall"])
@pytest.mark.parametrize(
    "after", [30, *(pytest.param(n, marks=pytest.mark.more) for n in (0, 5, 100))]
)
def test_a_line_that_breaks_in_the_first_words(
    make_server, make_proxy, make_peer, export_cache, clock, wire_clock, fault, after
):
    pages = make_pages(2, 100)
    fill(export_cache, pages)
    server = make_server()
    proxy = make_proxy(server.port)
    proxy.arm(after, fault)
    peer = make_peer(proxy.port)
    with wire_clock.hurrying_after(proxy.happened) if fault == "stall" else nullcontext():
        assert peer.lookup(pages) == set()
    assert peer.is_down and proxy.happened.is_set()
    wait_until(lambda: not server.num_connections or fault == "stall")
    if fault == "cut":
        clock.now += 10
        assert peer.lookup(pages) == set(pages) and pull(peer, pages)


def test_a_line_that_broke_while_nobody_used_it_is_replaced(
    make_server, make_proxy, make_peer, export_cache, log
):
    """A request is already sent, and only its answer is missing."""
    pages = make_pages(2, 100)
    fill(export_cache, pages)
    proxy = make_proxy(make_server().port)
    peer = make_peer(proxy.port)
    assert peer.lookup(pages) == set(pages)
    proxy.arm(0, "cut")
    assert peer.lookup(pages) == set(pages)
    assert proxy.happened.is_set() and proxy.num_connections == 2 and log.lines == []


@pytest.mark.parametrize(
    ("size", "place"),
    [
        *((1, 0.0), (4096, 0.5)),
        *(
            pytest.param(size, place, marks=pytest.mark.more)
            for size, place in (
                (4096, 0.0),
                (4096, 0.999),
                *((737280, x) for x in (0.0, 0.5, 0.999)),
            )
        ),
    ],
)
def test_a_bit_that_flips_on_the_way_is_found(
    make_server, make_proxy, make_peer, export_cache, clock, log, size, place
):
    pages = make_pages(1, size)
    fill(export_cache, pages)
    proxy = make_proxy(make_server().port)
    peer = make_peer(proxy.port)
    assert peer.lookup(pages) == set(pages)
    head = 4 + 1 + 4 + (1 if size < 128 else 3 if size < 65536 else 5) + 18  # of a Row
    proxy.arm(head + int(size * place), "flip")
    assert not pull(peer, pages)
    assert proxy.happened.is_set()
    assert peer.stats().bad_checksums == 1
    assert "it sent a page with a wrong checksum" in log.warnings()[0]
    clock.now += 10
    assert peer.lookup(pages) == set(pages) and pull(peer, pages)


@pytest.mark.parametrize(
    "seed",
    [
        *range(0, 30, 8),
        *(pytest.param(seed, marks=pytest.mark.more) for seed in range(30) if seed % 8),
    ],
)
def test_a_bit_that_flips_anywhere_gives_no_wrong_page(
    make_server, make_proxy, make_peer, export_cache, clock, log, seed
):
    pages = make_pages(3, 40, seed)
    fill(export_cache, pages)
    proxy = make_proxy(make_server().port)
    peer = make_peer(proxy.port, timeouts=QUICK)  # a length that changed is waited for
    proxy.arm(seed * 17, "flip")  # `pull` compares
    after = 2  # rounds, of which some may fail where a machine is slow
    while after:
        found = peer.lookup(pages)
        pull(peer, {key: page for key, page in pages.items() if key in found})
        clock.now += 100
        after -= proxy.happened.is_set()
