# SPDX-License-Identifier: Apache-2.0
"""The hosts and the relay for tests of several machines."""

import socket
import subprocess
import sys
import threading
import time

import pytest
from network.hosts import hosts, need_hosts
from network.relay import relay

#: Listens, takes one connection, and sends as many bytes as its argument says.
SENDER = """
import socket, sys
listening = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
listening.accept()[0].sendall(bytes(int(sys.argv[1])))
"""


def received(address):
    """Returns the bytes received until the other side closes, and their seconds."""
    started, count = time.monotonic(), 0
    with socket.create_connection(address, 60) as connection:
        while data := connection.recv(1 << 16):
            count += len(data)
    return count, time.monotonic() - started


def test_a_host_sends_at_its_rate_and_counts_what_it_sent():
    need_hosts()
    with (
        hosts(2, rate="80mbit") as (a, _),
        a.popen(sys.executable, "-c", SENDER, "2000000", stdout=-1) as sender,
    ):
        sender.stdout.readline()
        count, seconds = received((a.address, 7000))
    assert count == 2_000_000
    assert seconds > 0.1  # 10 MB/s, less what the first burst holds


def test_hosts_reach_each_other_until_a_cable_is_out():
    need_hosts()
    with hosts(2) as (a, b):
        with b.popen(sys.executable, "-c", SENDER, "5", stdout=-1) as sender:
            sender.stdout.readline()
            asking = f"import socket; socket.create_connection(({b.address!r}, 7000), 2)"
            assert subprocess.run(a.command(sys.executable, "-c", asking)).returncode == 0
        b.cut()
        cut = subprocess.run(a.command(sys.executable, "-c", asking), capture_output=True)
        assert cut.returncode != 0
        assert b.sent_bytes > 0 and a.received_bytes > 0


@pytest.fixture
def echo():
    """Port of an echo server."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]


def test_a_relay_delays_each_way(echo):
    with (
        relay("127.0.0.1", echo, delay=0.1) as between,
        socket.create_connection((between.host, between.port), 60) as connection,
    ):
        started = time.monotonic()
        connection.sendall(b"hello")
        assert connection.recv(5) == b"hello"
        assert time.monotonic() - started >= 0.2


def test_a_relay_holds_and_cuts(echo):
    with (
        relay("127.0.0.1", echo) as between,
        socket.create_connection((between.host, between.port), 60) as connection,
    ):
        connection.sendall(b"a")
        assert connection.recv(1) == b"a"
        between.order("hold")
        connection.sendall(b"b")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        between.order("pass")
        connection.settimeout(60)
        assert connection.recv(1) == b"b"
        between.order("cut")
        with pytest.raises(ConnectionError):
            if not connection.recv(1):
                raise ConnectionError
