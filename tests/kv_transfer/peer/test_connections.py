# SPDX-License-Identifier: Apache-2.0
"""A client's connections: reused, few, and closed from outside."""

import errno
import os
import socket
import sys
import threading

import pytest
from kv_transfer.peer.engines import make_terms, wait_until

from vllm_metal.kv_transfer.peer import connections as module
from vllm_metal.kv_transfer.peer.connections import Connections, Unavailable
from vllm_metal.kv_transfer.peer.limits import Timeouts
from vllm_metal.kv_transfer.peer.wire import PeerDown
from vllm_metal.settings.address import Address


class Listener:
    """A listening socket that the system accepts on, without any replies."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._socket.getsockname())

    def accept(self):
        return self._socket.accept()[0]

    def close(self):
        self._socket.close()


@pytest.fixture
def listener(ends):
    listener = Listener()
    ends.append(listener)
    return listener


@pytest.fixture
def make(ends, listener):
    def make(most=3, is_current=lambda own: True, may_connect=lambda: True, no_progress=60):
        timeouts = Timeouts(connect=60.0, no_progress=no_progress)
        terms = make_terms()
        connections = Connections(
            *(listener.address, lambda link: terms, is_current, may_connect),
            *(timeouts, most),
        )
        ends.append(connections)
        return connections

    return make


def test_a_connection_is_used_again(make):
    connections = make()
    first = connections.call(lambda link: link)
    assert connections.call(lambda link: link) is first


def test_one_that_said_something_unasked_or_of_other_terms_is_not(make, listener):
    current = [True]
    connections = make(is_current=lambda own: current[0])
    first = connections.call(lambda link: link)
    far = listener.accept()
    far.sendall(b"x")
    wait_until(lambda: not first.is_quiet())
    second = connections.call(lambda link: link)
    assert second is not first and first.sock.fileno() == -1
    current[0] = False
    assert connections.call(lambda link: link) is not second
    far.close()


def test_no_more_than_so_many_at_a_time(make):
    connections = make(most=2, no_progress=0.05)

    def nested(link):
        def inner(other):
            with pytest.raises(Unavailable, match="all in use"):
                connections.call(lambda third: None)
            return other is not link

        return connections.call(inner)

    assert connections.call(nested)
    with pytest.raises(ZeroDivisionError):  # places come back, however a call ends
        connections.call(lambda link: 1 // 0)
    assert connections.call(nested)


def test_who_waits_gets_the_next_that_is_free(make):
    connections = make(most=1)
    used, results = threading.Event(), []
    waiter = threading.Thread(target=lambda: results.append(connections.call(lambda link: link)))

    def use(link):
        waiter.start()
        used.set()
        return link

    link = connections.call(use)
    waiter.join()
    assert used.is_set() and results == [link]


def test_none_is_opened_where_it_is_not_worth_trying(make, listener):
    connections = make(may_connect=lambda: False)
    with pytest.raises(Unavailable, match="backing off"):
        connections.call(lambda link: link)


def test_one_that_stands_still_is_not_reached(make):
    connections = make(no_progress=0.05)
    with pytest.raises(PeerDown, match="stopped answering"):
        connections.call(lambda link: link.receive(100))


def test_a_host_that_refuses_is_not_reached(make, listener):
    connections = make()
    listener.close()
    with pytest.raises(PeerDown, match="refused"):
        connections.call(lambda link: link)


def test_closing_ends_what_is_being_connected(monkeypatch, make):
    """Also at the moment when nothing exists yet that could be woken."""
    connecting, closed = threading.Event(), threading.Event()

    class Slow(socket.socket):
        def connect(self, place):
            connecting.set()
            closed.wait()
            super().connect(place)

    connections = make()
    monkeypatch.setattr(module.socket, "socket", Slow)
    results = []

    def call():
        with pytest.raises((Unavailable, PeerDown)) as raised:
            connections.call(lambda link: link.receive(100))
        results.append(raised)

    caller = threading.Thread(target=call)
    caller.start()
    connecting.wait()
    connections.close()
    closed.set()
    caller.join()
    assert len(results) == 1
    with pytest.raises(Unavailable, match="closed"):
        connections.call(lambda link: link)


def test_closing_wakes_who_waits_for_an_answer_or_a_place(make):
    connections = make(most=1, no_progress=600)
    waits = threading.Barrier(2)
    ended = []

    def call(work):
        with pytest.raises((OSError, Unavailable)):
            connections.call(work)
        ended.append(work)

    def receive(link):
        waits.wait()
        link.receive(100)

    threads = [threading.Thread(target=call, args=(receive,))]
    threads[0].start()
    waits.wait()
    threads.append(threading.Thread(target=call, args=(receive,)))
    threads[1].start()
    connections.close()
    for thread in threads:
        thread.join()
    assert len(ended) == 2


@pytest.mark.parametrize(("system", "told"), [("darwin", True), ("linux", False)])
def test_a_network_that_macos_keeps_away_is_told(make, monkeypatch, system, told):
    def denied(sock, place):
        raise OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))

    monkeypatch.setattr(socket.socket, "connect", denied)
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(PeerDown, match=r"^No route to host") as raised:
        make().call(lambda link: None)
    assert ("Privacy & Security > Local Network" in str(raised.value)) == told
