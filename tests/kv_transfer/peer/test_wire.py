# SPDX-License-Identifier: Apache-2.0
"""Frames and rows over a socket pair, and timeouts."""

import socket
import threading
import tracemalloc

import pytest

from vllm_metal.kv_transfer.peer.limits import MAX_MESSAGE_BYTES
from vllm_metal.kv_transfer.peer.messages import Done, ProtocolError, Renew, decode
from vllm_metal.kv_transfer.peer.wire import Link, Unwanted


@pytest.fixture
def pair():
    """Two ends of a TCP connection: a link and a plain socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far = listener.accept()[0]
    yield Link(near, 60), far
    near.close()
    far.close()


def test_messages_and_rows_go_both_ways(pair):
    link, far = pair
    other = Link(far, 60)
    row = bytes(range(256)) * 8000

    def send():
        other.send(Done())
        other.send(Renew(), raw=memoryview(row))

    sending = threading.Thread(target=send)
    sending.start()
    assert decode(link.receive(100), Done) and decode(link.receive(100), Renew)
    into, pieces = bytearray(len(row)), []
    link.receive_row(memoryview(into), lambda: True, lambda piece: pieces.append(bytes(piece)))
    sending.join()
    assert into == row and b"".join(pieces) == row
    assert link.num_received == len(row) + 2 * 4 + len(b"\x91\xa4Done") + len(b"\x91\xa5Renew")


@pytest.mark.parametrize(("length", "limit"), [(101, 100), (2**32 - 1, MAX_MESSAGE_BYTES)])
def test_a_frame_that_is_too_long_is_refused_by_its_length(pair, length, limit):
    link, far = pair
    far.sendall(length.to_bytes(4, "little"))
    with pytest.raises(ProtocolError, match=f"{length} bytes, over the limit of {limit}"):
        link.receive(limit)


def test_a_length_that_is_only_claimed_takes_no_memory(pair):
    link, far = pair
    far.sendall(MAX_MESSAGE_BYTES.to_bytes(4, "little") + b"x" * 1000)
    far.shutdown(socket.SHUT_WR)
    tracemalloc.start()
    with pytest.raises(ConnectionError):
        link.receive(MAX_MESSAGE_BYTES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 300_000


@pytest.fixture
def hasty(pair):
    """The same with a link that has a short timeout."""
    link, far = pair
    return Link(link.sock, 0.1), far


@pytest.mark.parametrize("sent", [b"", b"\x05\0", b"\x05\0\0\0abcd"])
def test_a_frame_that_does_not_come_whole_in_time(hasty, sent):
    link, far = hasty
    far.sendall(sent)
    with pytest.raises(TimeoutError):
        link.receive(100)


@pytest.mark.parametrize("sent", [b"", b"\x05\0", b"\x05\0\0\0abcd"])
def test_a_connection_that_ends_in_a_frame(pair, sent):
    link, far = pair
    far.sendall(sent)
    far.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionError):
        link.receive(100)


@pytest.mark.parametrize("what", ["frame", "row"])
def test_drops_are_no_progress(hasty, what):
    """Single bytes end each wait, but are no reason to continue."""
    link, far = hasty
    ended = threading.Event()

    def drip():
        while not ended.wait(0.001):
            far.send(b"\x40")

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(TimeoutError):
        if what == "frame":
            link.receive_bytes(10**6)
        else:
            link.receive_row(memoryview(bytearray(10**6)), lambda: True, lambda piece: None)
    ended.set()
    dripping.join()


def test_who_does_not_read_is_given_up(hasty):
    link, _ = hasty
    with pytest.raises(TimeoutError):
        link.send(Done(), raw=memoryview(bytes(64 << 20)))


def test_what_went_whole_is_not_late(pair, wire_clock):
    """However long the thread was not scheduled in between."""
    link, far = pair
    other, row = Link(far, 60), bytearray(100)
    always = threading.Event()
    always.set()
    with wire_clock.hurrying_after(always):
        other.send(Renew(), raw=memoryview(bytes(100)))
        assert decode(link.receive(100), Renew)
        link.receive_row(memoryview(row), lambda: True, lambda piece: None)


def test_a_row_that_nobody_wants(pair):
    link, far = pair
    far.sendall(b"x" * 10)
    answers = iter([True, True, False])
    with pytest.raises(Unwanted):
        link.receive_row(memoryview(bytearray(99)), lambda: next(answers), lambda piece: None)
    with pytest.raises(Unwanted):
        link.receive(100, lambda: False)


def test_a_quiet_connection(pair):
    link, far = pair
    assert link.is_quiet()
    far.sendall(b"x")
    link.wait_for_message()
    assert not link.is_quiet()
    link.receive_bytes(1)
    assert link.is_quiet()
    far.close()
    link.wait_for_message()
    assert not link.is_quiet()
    with pytest.raises(ConnectionError):
        link.receive(100)
