# SPDX-License-Identifier: Apache-2.0
"""Finding and fetching a peer's pages; rejected peers."""

import struct
import threading
from contextlib import suppress
from dataclasses import replace

import pytest
from kv_transfer.peer.engines import (
    CALM,
    SECRET,
    blank,
    fill,
    make_pages,
    make_terms,
    pull,
    views,
    wait_until,
)

from vllm_metal.kv_transfer.peer import handshake, limits
from vllm_metal.kv_transfer.peer.client import Peer
from vllm_metal.kv_transfer.peer.export_cache import ExportCache
from vllm_metal.kv_transfer.peer.messages import Found
from vllm_metal.settings.address import Address


class Terms:
    """Terms of an engine that a test may change."""

    def __init__(self, **terms):
        self.now = make_terms(**terms)

    def __call__(self):
        return self.now


@pytest.mark.parametrize(
    ("size", "secret"),
    [
        *((0, SECRET), (17, SECRET), (65537, b""), (737280, SECRET)),
        *(pytest.param(size, SECRET, marks=pytest.mark.more) for size in (1, 4096, 3 << 20)),
        *(pytest.param(size, b"", marks=pytest.mark.slow) for size in (0, 1, 17, 4096, 3 << 20)),
    ],
)
def test_pages_come_bit_by_bit_the_same(make_server, make_peer, export_cache, secret, size):
    pages = make_pages(3, size)
    fill(export_cache, pages)
    peer = make_peer(make_server(secret).port, secret)
    others = [b"x" * 36, b"y", b"z" * 64]
    assert peer.lookup([*others, *pages]) == set(pages)
    assert peer.engine_id == "prefill-1"
    assert pull(peer, pages)
    assert pull(peer, dict(reversed(pages.items())))
    assert pull(peer, {})
    stats = peer.stats()
    assert (stats.num_asked, stats.num_found, stats.fetched_pages) == (6, 3, 6)
    assert stats.fetched_bytes == 6 * size
    wait_until(lambda: export_cache.stats().sent_pages == 6)  # counted when they are sent
    assert export_cache.stats().sent_bytes == 6 * size
    assert stats.failed_fetches == stats.bad_checksums == 0


def test_sizes_may_differ_within_a_fetch(make_server, make_peer, export_cache):
    pages = {
        **make_pages(20, 100, seed=1),
        **make_pages(2, 1 << 20, seed=2),
        **make_pages(20, 5, seed=3),
    }
    fill(export_cache, pages)
    assert pull(make_peer(make_server().port), pages)


def test_more_keys_than_a_message_may_have(monkeypatch, make_server, make_peer, export_cache):
    from vllm_metal.kv_transfer.peer import client

    monkeypatch.setattr(client, "MAX_KEYS", 7)
    pages = make_pages(50, 10)
    fill(export_cache, pages)
    peer = make_peer(make_server().port)
    assert peer.lookup(pages) == set(pages)
    assert pull(peer, pages)


def test_a_message_takes_as_many_keys_as_it_may(make_server, make_peer, export_cache):
    there = make_pages(1, 10)
    fill(export_cache, there)
    keys = [number.to_bytes(limits.MAX_KEY_BYTES, "big") for number in range(limits.MAX_KEYS - 1)]
    assert make_peer(make_server().port).lookup([*keys, *there]) == set(there)


def test_a_page_that_is_not_there_is_no_fetch(make_server, make_peer, export_cache):
    pages = make_pages(5, 1000)
    fill(export_cache, pages)
    peer = make_peer(make_server().port)
    peer.lookup(pages)
    export_cache.discard(list(pages)[3:4])
    assert not pull(peer, pages)
    del pages[list(pages)[3]]
    assert pull(peer, pages)
    assert peer.stats().failed_fetches == 1 and not peer.is_down


@pytest.mark.parametrize("other", [999, 1001, 0])
def test_memory_of_another_size_gets_nothing(make_server, make_peer, export_cache, other):
    pages = make_pages(2, 1000)
    fill(export_cache, pages)
    peer = make_peer(make_server().port)
    into = [bytearray(1000), bytearray(other)]
    assert not peer.fetch(list(pages), views(into), lambda: True)
    assert into[1] == bytes(other)


def test_memory_that_cannot_be_written_is_no_fetch(make_server, make_peer, export_cache, log):
    pages = make_pages(1, 8)
    fill(export_cache, pages)
    peer = make_peer(make_server().port)
    assert not peer.fetch(list(pages), [memoryview(bytes(8))], lambda: True)
    assert not peer.fetch(list(pages), [], lambda: True)
    assert pull(peer, pages)
    log.lines.clear()  # these are a caller's mistakes, and have their tracebacks there


def test_fetches_in_parallel(make_server, make_peer, export_cache):
    pages = make_pages(64, 50_000)
    fill(export_cache, pages)
    proxy_free = make_server()
    peer = make_peer(proxy_free.port)
    good = []

    def work(number):
        some = dict(list(pages.items())[number::8])
        found = peer.lookup(some)
        good.append(found == set(some) and all(pull(peer, some) for _ in range(5)))
        peer.release(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [True] * 8
    wait_until(lambda: export_cache.stats().leased_bytes == 0)


def test_it_uses_so_many_connections_at_most(make_server, make_proxy, make_peer, export_cache):
    pages = make_pages(30, 20_000)
    fill(export_cache, pages)
    proxy = make_proxy(make_server().port)
    peer = make_peer(proxy.port)
    threads = [threading.Thread(target=pull, args=(peer, pages)) for _ in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peer.stats().fetched_pages == 9 * 30
    assert 1 <= proxy.num_connections <= limits.CONNECTIONS_OF_A_PEER


def test_nobody_wants_it_any_more(make_server, make_proxy, make_peer, export_cache):
    pages = make_pages(3, 1 << 20)
    fill(export_cache, pages)
    proxy = make_proxy(make_server().port)
    peer = make_peer(proxy.port)
    peer.lookup(())
    assert not pull(peer, pages, lambda: False)
    assert not peer.is_down
    proxy.arm(1_500_000, "stall")
    assert not pull(peer, pages, lambda: not proxy.happened.is_set())
    assert not peer.is_down and peer.stats().fetched_pages == 0


def test_asking_waits_for_pages_that_are_being_made(make_server, make_peer, export_cache):
    pages = make_pages(3, 100)
    first, _, third = pages
    export_cache.expect(pages)
    peer = make_peer(make_server().port)
    assert peer.lookup(pages, wait_s=0) == set()
    found = []
    asking = threading.Thread(target=lambda: found.append(peer.lookup(pages)))
    asking.start()
    fill(export_cache, {first: pages[first], third: pages[third]})
    export_cache.expect_no_more(pages)
    asking.join()
    assert found == [{first, third}]


@pytest.mark.more
def test_asking_does_not_wait_for_ever(make_server, make_peer, export_cache):
    """The wait is longer than a connection may stall and within the server's limit."""
    pages = make_pages(2, 100)
    fill(export_cache, dict([next(iter(pages.items()))]))
    export_cache.expect(pages)
    server = make_server(timeouts=replace(CALM, wait=12.0, waiting_interval=0.1))
    peer = make_peer(server.port, timeouts=replace(CALM, no_progress=8.0))
    assert peer.lookup(pages, wait_s=1000) == {next(iter(pages))}
    assert not peer.is_down


# -- leases


def test_found_pages_are_leased_until_they_are_released(make_server, make_peer, export_cache):
    pages = make_pages(4, 1000)
    fill(export_cache, pages)
    peer = make_peer(make_server().port)
    asked = list(pages)
    assert peer.lookup(asked[:2]) and peer.lookup(asked[1:3])
    assert export_cache.stats().leased_bytes == 3000
    peer.release(asked[:2])  # the second was asked for twice
    wait_until(lambda: export_cache.stats().leased_bytes == 2000)
    peer.release(asked[1:4])
    wait_until(lambda: export_cache.stats().leased_bytes == 0)
    peer.release(asked)
    assert peer.lookup(asked) == set(asked)


def test_leases_are_renewed_while_pages_are_wanted(make_server, make_peer, clock):
    """The test moves both sides' clocks; the keeper's pace is real."""
    renewed_at = []

    class RecordingCache(ExportCache):
        def renew(self, holder, seconds):
            super().renew(holder, seconds)
            renewed_at.append(clock.now)

    export_cache = RecordingCache(1 << 20, clock)
    pages = make_pages(1, 1000)
    fill(export_cache, pages)
    peer = make_peer(
        make_server(export_cache=export_cache).port, timeouts=replace(CALM, renew=0.05)
    )
    peer.lookup(pages)
    for _ in range(12):  # 240 s, of leases of 30 s
        clock.now += 20
        wait_until(lambda: clock.now in renewed_at)
        assert export_cache.stats().leased_bytes == 1000
    clock.now += 61  # nobody loads for five minutes: it was forgotten
    wait_until(lambda: export_cache.stats().leased_bytes == 0)


# -- peers to take nothing from


@pytest.mark.parametrize(
    ("servers", "clients"), [(SECRET, b"x" * 16), (SECRET, b""), (b"", SECRET)]
)
def test_another_secret_gets_nothing(make_server, make_peer, export_cache, log, servers, clients):
    pages = make_pages(1, 100)
    fill(export_cache, pages)
    peer = make_peer(make_server(servers).port, clients)
    assert peer.lookup(pages) == set() and not pull(peer, pages)
    assert peer.lookup(pages) == set()
    wait_until(lambda: len(log.warnings()) == 2)  # one on each side
    assert all("secret" in text for text in log.warnings())
    assert any(f"127.0.0.1:{peer.address.port} is not used" in text for text in log.warnings())
    assert peer.engine_id is None and export_cache.stats().sent_pages == 0


@pytest.mark.parametrize("there", [[], [True] * 3])
def test_an_answer_for_other_pages_is_none(monkeypatch, make_server, make_peer, log, there):
    monkeypatch.setattr("vllm_metal.kv_transfer.peer.server.Found", lambda _: Found(there))
    peer = make_peer(make_server().port)
    assert peer.lookup([b"one", b"two"]) == set() and peer.is_down
    assert f"it answered for {len(there)} pages, expected 2" in log.warnings()[0]


def test_without_a_secret_nothing_but_loopback_is_used(monkeypatch, make_server, make_peer, log):
    from vllm_metal.kv_transfer.peer.wire import Link

    server = make_server(b"")

    def far_if_server(self):
        return "10.0.0.2" if self.sock.getpeername()[1] == server.port else "127.0.0.1"

    monkeypatch.setattr(Link, "peer_ip", far_if_server)
    peer = make_peer(server.port, b"")
    assert peer.lookup(()) == set() and peer.engine_id is None
    assert "on another machine, which requires a 'secret'" in log.warnings()[0]


def test_another_version_is_refused_by_name(monkeypatch, make_server, make_peer, log, clock):
    server = make_server()
    ours = handshake.PREAMBLE
    monkeypatch.setattr(handshake, "PREAMBLE", ours[:8] + struct.pack("<I", 9))
    peer = make_peer(server.port)
    for _ in range(3):
        assert peer.lookup([b"key"]) == set()
        clock.now += 100
    (said,) = log.warnings()
    assert f"127.0.0.1:{server.port}" in said and "version 9, this engine 3" in said
    monkeypatch.undo()
    peer.lookup(())
    assert peer.engine_id == "prefill-1"
    assert log.lines[-1] == ("INFO", f"Connected to the peer {peer.address}")


def test_a_proof_of_another_version_is_none(monkeypatch, make_server, make_peer, log):
    server = make_server()
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", 1)
    right = handshake.Challenge(b"s" * 32, b"c" * 32, b"i" * 16).proof(SECRET, "client")
    monkeypatch.undo()
    assert right != handshake.Challenge(b"s" * 32, b"c" * 32, b"i" * 16).proof(SECRET, "client")
    assert make_peer(server.port).lookup(()) == set()


def test_other_terms_are_refused_by_name_and_once(make_server, make_peer, export_cache, log, clock):
    pages = make_pages(1, 100)
    fill(export_cache, pages)
    terms = Terms(fingerprint="beef", dtype="float16")
    server = make_server(terms=terms)
    peer = make_peer(server.port, difference=lambda facts: f"dtype\n{facts['dtype']}, not float32")
    for _ in range(3):
        assert peer.lookup(pages) == set() and not pull(peer, pages)
        clock.now += 70
    (said,) = log.warnings()
    assert f"The peer 127.0.0.1:{server.port} is not used: dtype float16, not float32" == said
    terms.now = make_terms()
    assert peer.lookup(pages) == set(pages)  # tried again after a minute


def test_refusal_ends_when_own_terms_change(make_server, make_peer, export_cache, log):
    pages = make_pages(1, 100)
    fill(export_cache, pages)
    own = Terms(fingerprint="beef")
    server = make_server()
    peer = make_peer(server.port, terms=own)
    assert peer.lookup(pages) == set()
    own.now = make_terms("decode-1")
    assert peer.lookup(pages) == set(pages)  # at once
    own.now = make_terms("decode-1", page_bytes=(4096, 512))
    assert peer.lookup(pages) == set()
    assert "its pages have (4096,) bytes, this engine's (4096, 512)" in log.warnings()[-1]
    own.now = make_terms("decode-2")
    assert pull(peer, pages)


def test_an_engine_that_is_named_to_itself_is_no_peer(
    make_server, make_peer, export_cache, log, clock
):
    """One file may name all engines to each of them."""
    pages = make_pages(1, 100)
    fill(export_cache, pages)
    server = make_server()
    peer = make_peer(server.port, terms=make_terms)
    assert peer.lookup(pages) == set() and not peer.ping() and peer.is_failing
    clock.now += 100
    assert peer.lookup(pages) == set() and log.lines == []


def test_a_peer_that_was_away_is_there_again_once_it_was_greeted(make_server, make_peer, clock):
    server = make_server()
    peer = make_peer(server.port)
    assert peer.ping() and peer.engine_id == "prefill-1" and not peer.is_failing
    peer.avoid()
    assert not peer.ping() and peer.is_failing
    clock.now += 10
    assert not peer.is_down and peer.is_failing
    assert peer.ping() and not peer.is_failing
    server.close()
    assert not peer.ping() and peer.is_failing


@pytest.mark.parametrize("words", ["", None, KeyError("facts")])
def test_a_difference_that_cannot_be_worded(make_server, make_peer, log, words):
    def difference(facts):
        if isinstance(words, Exception):
            raise words
        return words

    peer = make_peer(make_server(terms=Terms(fingerprint="beef")).port, difference=difference)
    assert peer.lookup([b"key"]) == set()
    assert "another model, or other settings" in log.warnings()[0]


def test_facts_may_be_too_long_to_be_sent(make_server, make_peer, log):
    terms = Terms(fingerprint="beef", layers="x" * limits.MAX_FACTS_BYTES)
    peer = make_peer(make_server(terms=terms).port, difference=lambda facts: str(facts))
    assert peer.lookup([b"key"]) == set()
    assert log.warnings()[0].endswith("not used: {}")


def test_a_server_that_loads_other_weights_gives_no_more_pages(
    make_server, make_peer, export_cache
):
    pages = make_pages(2, 100)
    fill(export_cache, pages)
    terms = Terms()
    peer = make_peer(make_server(terms=terms).port)
    assert peer.lookup(pages) == set(pages) and pull(peer, pages)
    export_cache.clear()
    terms.now = make_terms(fingerprint="beef")
    fill(export_cache, {key: page[::-1] for key, page in pages.items()})
    assert not pull(peer, pages)
    assert peer.lookup(pages) == set()


def test_pages_that_came_too_late_are_no_fetch(make_server, make_peer, export_cache):
    """The engine's weights changed while the pages came."""
    pages = make_pages(2, 100)
    fill(export_cache, pages)
    own = Terms()
    peer = make_peer(make_server().port, terms=own)
    peer.lookup(pages)

    def wanted():
        own.now = make_terms(fingerprint="beef")
        return True

    assert not pull(peer, pages, wanted)


# -- peers that are down


def test_a_peer_that_is_not_there_is_down_for_a_while(
    make_server, make_peer, export_cache, clock, log
):
    pages = make_pages(1, 100)
    fill(export_cache, pages)
    server = make_server()
    port = server.port
    server.close()
    peer = make_peer(port)
    assert not peer.is_down
    assert peer.lookup(pages) == set() and peer.is_down
    make_server(port=port)
    clock.now += 9
    assert peer.is_down and peer.lookup(pages) == set() and not pull(peer, pages)
    clock.now += 1
    assert not peer.is_down and peer.lookup(pages) == set(pages)
    assert [level for level, _ in log.lines] == ["WARNING", "INFO"]
    assert f"127.0.0.1:{port} is unavailable (Connection refused)" in log.lines[0][1]


def test_a_name_that_nobody_has_is_down(ends, log):
    peer = Peer(Address("no-such-host.invalid", 1), SECRET, make_terms, str)
    ends.append(peer)
    assert peer.lookup([b"key"]) == set() and peer.is_down


def test_a_restarted_peer_is_found_again_silently(make_server, make_peer, export_cache, log):
    pages = make_pages(2, 100)
    fill(export_cache, pages)
    server = make_server()
    peer = make_peer(server.port)
    assert peer.lookup(pages) == set(pages)
    server.close()
    again = make_server(port=server.port, terms=Terms(engine_id="prefill-2"))
    assert peer.lookup(pages) == set(pages) and pull(peer, pages)
    assert peer.engine_id == "prefill-2" and log.lines == []
    again.close()


def test_something_else_answers(ends, make_peer, log):
    import socket

    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        with listener.accept()[0] as sock:
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with suppress(ConnectionResetError):
                sock.recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    peer = make_peer(listener.getsockname()[1])
    assert peer.lookup([b"key"]) == set()
    thread.join()
    listener.close()
    assert "not a vllm-metal engine" in log.warnings()[0]


def test_a_replayed_conversation_proves_nothing(ends, make_server, make_peer, log):
    """A false server replays a true one's words to a client that sends the same."""
    import socket

    server = make_server()
    sock = socket.create_connection(("127.0.0.1", server.port))
    heard = []

    class Recorder:
        def __init__(self, link):
            self._link = link

        def __getattr__(self, name):
            return getattr(self._link, name)

        def receive(self, limit):
            heard.append(bytes(self._link.receive(limit)))
            return bytearray(heard[-1])

    from vllm_metal.kv_transfer.peer.wire import Link

    handshake.introduce(Recorder(Link(sock, 60)), SECRET, b"i" * 16, make_terms())
    sock.close()
    listener = socket.create_server(("127.0.0.1", 0))

    def replay():
        with listener.accept()[0] as near:
            framed = [struct.pack("<I", len(body)) + body for body in heard]
            near.sendall(handshake.PREAMBLE + b"".join(framed))
            with suppress(ConnectionResetError):
                while near.recv(4096):
                    pass

    thread = threading.Thread(target=replay)
    thread.start()
    peer = make_peer(listener.getsockname()[1])
    assert peer.lookup([b"key"]) == set() and peer.engine_id is None
    assert "secret" in log.warnings()[-1]
    peer.close()
    thread.join()
    listener.close()


def test_closing_wakes_calls_and_ends_all(make_server, make_peer, export_cache):
    pages = make_pages(1, 100)
    export_cache.expect(pages)
    peer = make_peer(make_server().port)
    results = []
    asking = threading.Thread(target=lambda: results.append(peer.lookup(pages, wait_s=1000)))
    asking.start()
    wait_until(lambda: peer.engine_id is not None)
    peer.close()
    asking.join()
    assert results == [frozenset()]
    export_cache.expect_no_more(pages)
    fill(export_cache, pages)
    assert peer.lookup(pages) == set()
    assert not peer.fetch(list(pages), views(blank(pages.values())), lambda: True)
    peer.release(pages)
    peer.close()
