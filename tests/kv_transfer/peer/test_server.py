# SPDX-License-Identifier: Apache-2.0
"""A server with many, late, dead, silent or malicious clients."""

import random
import resource
import signal
import socket
import sys
import threading
import time

import pytest
from kv_transfer.peer.engines import (
    CALM,
    QUICK,
    SECRET,
    connect,
    fill,
    introduced,
    is_over,
    make_pages,
    make_terms,
    pull,
    wait_until,
)

from vllm_metal.kv_transfer.peer import handshake
from vllm_metal.kv_transfer.peer.handshake import Challenge
from vllm_metal.kv_transfer.peer.limits import (
    MAX_CONNECTIONS,
    MAX_MESSAGE_BYTES,
    MAX_UNAUTHENTICATED,
    Timeouts,
)
from vllm_metal.kv_transfer.peer.messages import (
    Ask,
    Done,
    Fetch,
    Found,
    Greeting,
    Offer,
    Proof,
    Release,
    Renew,
    Stranger,
    Waiting,
    Welcome,
    decode,
    encode,
)
from vllm_metal.kv_transfer.peer.served_pages import ServedPages
from vllm_metal.kv_transfer.peer.server import PageServer
from vllm_metal.kv_transfer.peer.wire import PeerDown
from vllm_metal.settings.address import Address


def framed(message):
    body = encode(message)
    return len(body).to_bytes(4, "little") + body


# -- where it listens


def test_without_a_secret_it_listens_on_loopback_only(export_cache):
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match=r"'listen': .*'secret'.*127\.0\.0\.1"):
            PageServer(Address(host, 0), b"", export_cache, make_terms)


def test_with_a_secret_it_listens_anywhere(ends, make_peer, export_cache):
    server = PageServer(Address("0.0.0.0", 0), SECRET, export_cache, make_terms, CALM)
    ends.append(server)
    peer = make_peer(server.port)
    peer.lookup(())
    assert peer.engine_id == "prefill-1"


def test_a_client_from_elsewhere_needs_a_secret(monkeypatch, make_server):
    from vllm_metal.kv_transfer.peer.wire import Link

    server = make_server(b"")
    monkeypatch.setattr(Link, "peer_ip", lambda self: "10.0.0.2")
    assert is_over(connect(server.port))


def test_an_address_that_is_taken_or_another_machines_is_named(make_server, export_cache):
    server = make_server()
    with pytest.raises(OSError, match=f"cannot listen on 'listen': 127.0.0.1:{server.port}"):
        make_server(port=server.port)
    with pytest.raises(OSError, match=r"cannot listen on 'listen': 192\.0\.2\.1:9"):
        PageServer(Address("192.0.2.1", 9), SECRET, export_cache, make_terms)
    with pytest.raises(OSError, match=r"'listen': no-such-host.invalid:9 is not an address"):
        PageServer(Address("no-such-host.invalid", 9), SECRET, export_cache, make_terms)


# -- too many, too late, too slow


def test_one_connection_too_many_is_told_that_it_is_busy(make_server, make_peer, log, clock):
    server = make_server(timeouts=Timeouts(no_progress=60))
    links = [introduced(server.port) for _ in range(MAX_CONNECTIONS)]
    for link in links:  # an answer: the server counts it among those that have proved the secret
        link.send(Renew())
        assert decode(link.receive(100), Done)
    with pytest.raises(PeerDown, match="in use"):
        introduced(server.port)
    peer = make_peer(server.port)
    assert peer.lookup([b"key"]) == set() and peer.is_down
    assert "all its connections are in use" in log.warnings()[-1]
    links.pop().sock.close()
    wait_until(lambda: server.num_connections == MAX_CONNECTIONS - 1)
    clock.now += 11
    peer.lookup(())
    assert peer.engine_id == "prefill-1"
    for link in links:
        link.sock.close()


def test_strangers_shut_nobody_out(make_server, make_peer):
    server = make_server()
    strangers = []
    for _ in range(4):
        strangers += [connect(server.port) for _ in range(MAX_UNAUTHENTICATED)]
        strangers[-1].receive_bytes(1)  # all are taken
        make_peer(server.port).lookup(())
        introduced(server.port).sock.close()
        assert server.num_connections <= 2 * MAX_UNAUTHENTICATED
    wait_until(lambda: sum(map(is_over, strangers[:MAX_UNAUTHENTICATED])) == MAX_UNAUTHENTICATED)
    for link in strangers:
        link.sock.close()


@pytest.mark.parametrize("said", ["nothing", "a part", "drop by drop"])
def test_who_does_not_authenticate_in_time_is_dropped(make_server, said):
    link = connect(make_server(timeouts=QUICK).port)
    if said == "a part":
        link.send_bytes(handshake.PREAMBLE + b"\x50\0")

    def is_dropped():
        if said == "drop by drop":
            try:
                link.send_bytes(handshake.PREAMBLE[:1])
            except OSError:
                return True
        return is_over(link)

    wait_until(is_dropped)


def test_who_knows_the_secret_may_be_silent(make_server, wire_clock):
    link = introduced(make_server().port)
    wire_clock.skip()
    link.send(Renew())
    assert decode(link.receive(100), Done)
    link.send_bytes(b"\x10\0\0\0begun")  # but not in the middle of a word
    while not is_over(link):
        wire_clock.skip()


def test_who_does_not_read_is_dropped(make_server, make_peer, export_cache, wire_clock):
    pages = make_pages(12, 1 << 20)
    fill(export_cache, pages)
    server = make_server()
    stuck = introduced(server.port)
    stuck.send(Fetch(list(pages)))
    peer = make_peer(server.port)
    assert pull(peer, pages)
    wait_until(lambda: wire_clock.skip() or server.num_connections == 1)  # the good one's
    assert pull(peer, pages)


def test_clients_that_only_connect_and_go(make_server, make_peer):
    server = make_server()
    for _ in range(50):
        socket.create_connection(("127.0.0.1", server.port)).close()
    wait_until(lambda: not server.num_connections)
    peer = make_peer(server.port)
    peer.lookup(())
    assert peer.engine_id == "prefill-1"


@pytest.mark.parametrize("other", [{"fingerprint": "beef"}, {"page_bytes": (4096, 4096)}])
def test_who_has_other_terms_hears_these_and_no_more(make_server, other):
    link = connect(make_server().port)
    theirs = handshake.introduce(link, SECRET, b"i" * 16, make_terms(**other))
    assert theirs == make_terms()
    wait_until(lambda: is_over(link))


# -- sessions


def test_leases_end_with_the_last_connection_of_a_session(make_server, export_cache):
    pages = make_pages(4, 1000)
    keys = list(pages)
    fill(export_cache, pages)
    server = make_server()
    first, second, other = (introduced(server.port, session * 16) for session in (b"a", b"a", b"b"))
    for link, asked in ((first, keys[:2]), (second, keys[2:3]), (other, keys[3:])):
        link.send(Ask(asked, 0))
        decode(link.receive(100), Found)
    assert export_cache.stats().leased_bytes == 4000
    first.sock.close()
    wait_until(lambda: server.num_connections == 2)
    assert export_cache.stats().leased_bytes == 4000
    other.send(Release(keys))  # of others' leases it ends none
    decode(other.receive(100), Done)
    assert export_cache.stats().leased_bytes == 3000
    second.sock.close()
    wait_until(lambda: export_cache.stats().leased_bytes == 0)
    other.sock.close()


def test_a_client_that_is_killed_holds_nothing(make_server, export_cache, start_engine):
    fill(export_cache, make_pages(5, 1000, seed=9))
    server = make_server()
    child = start_engine("hold", server.port, 9, 5, 1000)
    assert child.stdout.readline() == "5\n"
    assert export_cache.stats().leased_bytes == 5000
    child.send_signal(signal.SIGKILL)
    wait_until(lambda: export_cache.stats().leased_bytes == 0 and not server.num_connections)


def test_pages_that_come_for_a_fetch_are_leased_until_they_are_sent_or_it_ends(export_cache):
    """A fetch that breaks off leaves no lease."""

    class Pool:
        """A pool whose wanted pages are in the send cache at once."""

        def want(self, keys, expect):
            fill(export_cache, {key: pages[key] for key in keys})

    pages = make_pages(3, 1000)
    served = ServedPages(export_cache, Pool(), CALM)
    with served.export_pages(1, list(pages), lambda: True) as give:
        assert export_cache.stats().leased_bytes == 3000
        give(next(iter(pages)))
        assert export_cache.stats().leased_bytes == 2000
    assert export_cache.stats().leased_bytes == 0 and export_cache.stats().pages == 3


def test_who_waits_hears_of_it(make_server, export_cache):
    export_cache.expect([b"key"])
    link = introduced(make_server().port)
    link.send(Ask([b"key"], 60_000))
    assert isinstance(decode(link.receive(100), Found, Waiting), Waiting)
    export_cache.expect_no_more([b"key"])
    while isinstance(answer := decode(link.receive(100), Found, Waiting), Waiting):
        pass
    assert answer.there == [False]
    export_cache.expect([b"key"])
    link.send(Ask([b"key"], 60_000))
    link.sock.close()


def test_closing_ends_connections_in_any_state(make_server, export_cache):
    export_cache.expect([b"key"])
    fill(export_cache, pages := make_pages(12, 1 << 20))
    server = make_server(timeouts=Timeouts(waiting_interval=0.05))
    links = [connect(server.port), *(introduced(server.port) for _ in range(3))]
    links[1].send(Ask([b"key"], 60_000))
    links[2].send(Fetch(list(pages)))
    links[2].receive_bytes(1)
    server.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("kv-peer")]
    assert all(is_over(link) for link in links)
    server.close()


# -- proofs


def answer_of(link, proof):
    link.send_bytes(handshake.PREAMBLE)
    link.send(proof)
    return decode(link.receive(100), Welcome, Stranger)


def test_a_proof_that_was_overheard_proves_nothing(make_server):
    server = make_server()
    nonces, proofs = [], []
    for _ in range(2):
        link = connect(server.port)
        link.receive_bytes(len(handshake.PREAMBLE))
        nonces.append(decode(link.receive(100), Greeting).nonce)
        challenge = Challenge(nonces[-1], b"c" * 32, b"i" * 16)
        proofs.append(Proof(b"i" * 16, b"c" * 32, challenge.proof(SECRET, "client")))
        if len(proofs) == 1:
            welcome = answer_of(link, proofs[0])
            assert challenge.is_proof(SECRET, "server", welcome.proof)
            # Another session, which is not proved, must not be taken over either.
        else:
            assert isinstance(answer_of(link, proofs[0]), Stranger)
            assert is_over(link)
    assert nonces[0] != nonces[1] and proofs[0].proof != proofs[1].proof


def test_a_servers_proof_is_not_a_clients(make_server):
    """The client sends back what it hears."""
    link = connect(make_server().port)
    link.receive_bytes(len(handshake.PREAMBLE))
    nonce = decode(link.receive(100), Greeting).nonce
    challenge = Challenge(nonce, nonce, b"i" * 16)
    reflected = Proof(b"i" * 16, nonce, challenge.proof(SECRET, "server"))
    assert isinstance(answer_of(link, reflected), Stranger)


# -- garbage


def client_says(nonce, keys):
    """Returns all valid client messages in order, with the right proof."""
    proof = Challenge(nonce, b"c" * 32, b"i" * 16).proof(SECRET, "client")
    return [
        handshake.PREAMBLE,
        framed(Proof(b"i" * 16, b"c" * 32, proof)),
        framed(Offer("decode", "f00d", [4096], b"")),
        framed(Ask(keys, 0)),
        framed(Fetch(keys)),
        framed(Renew()),
        framed(Release(keys)),
    ]


def random_msgpack(rng, depth=0):
    """Makes a random msgpack value."""
    kinds = ["nil", "int", "str", "bytes", "array", "map", "float", "ext", "claim"]
    match rng.choice(kinds[: 4 if depth > 3 else 9]):
        case "nil":
            return rng.choice([b"\xc0", b"\xc2", b"\xc3"])
        case "int":
            return b"\xcf" + rng.randbytes(8)
        case "str":
            return b"\xd9\x05" + rng.choice([b"Fetch", b"Proof", rng.randbytes(5)])
        case "bytes":
            return b"\xc4\x10" + rng.randbytes(16)
        case "array":
            items = [random_msgpack(rng, depth + 1) for _ in range(rng.randrange(6))]
            return bytes([0x90 + len(items)]) + b"".join(items)
        case "map":
            items = [random_msgpack(rng, depth + 1) for _ in range(2 * rng.randrange(4))]
            return bytes([0x80 + len(items) // 2]) + b"".join(items)
        case "float":
            return b"\xcb" + rng.randbytes(8)
        case "ext":
            return b"\xd6" + rng.randbytes(5)
        case "claim":  # of four thousand million items
            return rng.choice([b"\xdd", b"\xdf", b"\xc6", b"\xdb"]) + b"\xff" * 4
    raise AssertionError


def spoiled(rng, valid):
    """Makes garbage: nearly valid, or not at all."""
    whole = b"".join(valid)
    match rng.choice(["cut", "flip", "length", "msgpack", "noise", "order"]):
        case "cut":
            return whole[: rng.randrange(len(whole))]
        case "flip":
            flipped = bytearray(whole)
            for _ in range(rng.choice([1, 1, 1, 5])):
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case "length":
            claimed = rng.choice([0, 1, 4095, 4097, MAX_MESSAGE_BYTES, 1 << 30, (1 << 32) - 1])
            before = b"".join(valid[: rng.randrange(len(valid))])
            return before + claimed.to_bytes(4, "little") + rng.randbytes(rng.randrange(40))
        case "msgpack":
            body = random_msgpack(rng)
            before = b"".join(valid[: rng.randrange(len(valid))])
            return before + len(body).to_bytes(4, "little") + body
        case "noise":
            return rng.randbytes(rng.choice([1, 16, 300, 5000]))
        case "order":
            return b"".join(rng.sample(valid, len(valid)))
    raise AssertionError


def peak_bytes():
    """Returns this process's peak memory."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def throw(link, garbage):
    """Sends garbage only, and waits until the server has closed the connection."""
    try:
        link.sock.sendall(garbage)
        link.sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # it has ended it already
    deadline = time.monotonic() + 60
    while not is_over(link):
        assert time.monotonic() < deadline, "the server keeps a connection that said garbage"
    link.sock.close()


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_frames_of_garbage(make_server, make_peer, export_cache, log, count):
    """The server stays up and small, and a good client beside it notices nothing."""
    rng = random.Random(12)
    pages = make_pages(4, 4096)
    fill(export_cache, pages)
    server = make_server(timeouts=Timeouts())
    peer = make_peer(server.port)
    assert peer.lookup(pages) == set(pages)
    before = None
    for number in range(count):
        if number % 10 < 7:  # before authentication, and behind it
            link = connect(server.port)
            link.receive_bytes(len(handshake.PREAMBLE))
            nonce = decode(link.receive(100), Greeting).nonce
            throw(link, spoiled(rng, client_says(nonce, list(pages))))
        else:
            link = introduced(server.port, session=b"f" * 16)
            throw(link, spoiled(rng, client_says(bytes(32), list(pages))[3:]))
        if number % 100 == 0:
            assert pull(peer, pages)
            assert export_cache.stats().leased_bytes >= 4 * 4096
        if number == 100:
            before = peak_bytes()
    assert peak_bytes() - before < 32 << 20
    wait_until(lambda: server.num_connections <= 3 and server.num_sessions == 1)
    assert peer.lookup(pages) == set(pages) and pull(peer, pages) and not peer.is_down
    assert len(log.warnings()) <= 1  # that somebody did not know the secret
    assert peer.stats().bad_checksums == 0


@pytest.mark.parametrize("count", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_garbage_from_a_server_harms_no_client(ends, make_peer, clock, count):
    rng = random.Random(21)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    valid = [
        handshake.PREAMBLE,
        framed(Greeting(b"n" * 32)),
        framed(Welcome(b"p" * 32)),
        framed(Offer("p", "f00d", [4096], b"{}")),
        framed(Found([False])),
        framed(Done()),
    ]

    def answer():
        for _ in range(count):
            with listener.accept()[0] as sock:
                try:
                    sock.sendall(spoiled(rng, valid))
                    sock.shutdown(socket.SHUT_WR)
                    while sock.recv(4096):
                        pass
                except OSError:
                    pass

    thread = threading.Thread(target=answer)
    thread.start()
    peer = make_peer(port, timeouts=Timeouts(refused=1.0, down=1.0))
    for _ in range(count):
        assert peer.lookup([b"key"]) == set()
        clock.now += 2
    thread.join()
    listener.close()
    assert peer.engine_id is None
